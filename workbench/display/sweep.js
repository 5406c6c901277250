// Last part of the view of a sweep: what can be chosen, the panels, the legend, and the table of the same numbers.

const SWEEP_CHOICES = ["x", "y", "series", "facet", "filters", "log_x", "log_y"];
const SWEEP_MOST_PANELS = 12, SWEEP_MOST_LINES = 500, SWEEP_MOST_TICKS = 60, SWEEP_MOST_SERIES = 500;

function sweepSelect(view, label, name, columns, none) {
  const list = make("select", { "data-choice": name, onchange: (event) => view.choose({ [name]: event.target.value }) },
    ...(none ? [make("option", { value: "" }, "none")] : []), ...columns.map((column) => make("option", { value: column.name }, column.title)));
  view.sync.push(() => { list.value = view.choice[name]; });
  return make("label", { class: "lw-choice" }, label, " ", list);
}

function sweepToggle(view, label, name) {
  const box = make("input", { type: "checkbox", "data-choice": name, onchange: (event) => view.choose({ [name]: event.target.checked }) });
  view.sync.push(() => { box.checked = view.choice[name]; });
  return make("label", { class: "lw-choice lw-sweep-toggle" }, box, " ", label);
}

function sweepFilters(view) {
  const summary = make("summary"), inside = make("div", { class: "lw-sweep-filters" });
  for (const column of sweepSplits(view.data)) {
    if (!column.is_axis || column.labels.length > SWEEP_MOST_TICKS) continue;
    const boxes = column.labels.map((label) => make("input", { type: "checkbox", value: label, onchange: () => {
      const kept = boxes.filter((box) => box.checked).map((box) => box.value), { [column.name]: _, ...others } = view.choice.filters;
      view.choose({ filters: kept.length === boxes.length ? others : { ...others, [column.name]: kept } });
    } }));
    view.sync.push(() => boxes.forEach((box) => { box.checked = view.choice.filters[column.name]?.includes(box.value) ?? true; }));
    inside.append(make("fieldset", { class: "lw-choice", "data-filter": column.name }, make("legend", {}, make("bdi", {}, column.title)),
      ...boxes.map((box, i) => make("label", { class: "lw-sweep-tickbox" }, box, make("bdi", {}, column.said[i])))));
  }
  view.sync.push(() => { const count = Object.keys(view.choice.filters).length; summary.textContent = count ? `Filter (${count} active)` : "Filter"; });
  return inside.children.length ? make("details", { class: "lw-sweep-filter" }, summary, inside) : "";
}

function sweepLegend(view) {
  const { data, choice } = view;
  view.legend.replaceChildren();
  const present = [...new Set(view.points.map((point) => point.series))].sort((a, b) => a - b);
  if (!choice.series) { Object.assign(view, { shown: new Set(present), legendKey: "" }); return; }
  const key = `${choice.series} ${present.join()}`;
  if (view.legendKey !== key) view.shown = new Set(present.slice(0, view.mostSeries));
  view.legendKey = key;
  const count = make("span", { class: "lw-fact", role: "status" });
  const boxes = present.map((code) => make("input", { type: "checkbox", checked: view.shown.has(code), onchange: (event) => {
    if (event.target.checked) view.shown.add(code); else view.shown.delete(code);
    say(); view.drawPanels();
  } }));
  const say = () => { count.textContent = view.shown.size < present.length ? `${view.shown.size} of ${present.length} series are drawn; tick others to draw them` : ""; };
  const only = (codes) => { view.shown = new Set(codes); boxes.forEach((box, i) => { box.checked = view.shown.has(present[i]); }); say(); view.drawPanels(); };
  say();
  const buttons = present.length <= 3 ? [] : [make("button", { class: "lw-button", type: "button", onclick: () => only(present) }, "all"),
    make("button", { class: "lw-button", type: "button", onclick: () => only([]) }, "none")];
  view.legend.append(make("fieldset", { class: "lw-choice lw-sweep-legend" }, make("legend", {}, make("bdi", {}, data.columns[choice.series].title)),
    ...boxes.map((box, i) => make("label", { class: "lw-sweep-tickbox" }, box, seriesSample(data, present[i], view.theme), make("bdi", {}, data.columns[choice.series].said[present[i]]))), ...buttons), count);
}

function sweepTable(view) {
  const { data, choice, points } = view;
  const parts = ["facet", "series", "x"].filter((part) => choice[part]);
  const heads = [...parts.map((part) => data.columns[choice[part]].title), `median ${data.columns[choice.y].title}`, "low", "high", "n", ...(points.some((point) => point.lost) ? ["without value"] : [])];
  const lines = points.slice(0, SWEEP_MOST_LINES).map((point, i) => {
    const cells = [sweepNumber(point.median), sweepNumber(point.low), sweepNumber(point.high), point.n, ...(heads.includes("without value") ? [point.lost] : [])];
    return make("tr", { "data-point": i }, ...parts.map((part) => make("th", { scope: "row" }, make("bdi", {}, data.columns[choice[part]].said[point[part]]))),
      ...cells.map((cell) => make("td", {}, String(cell))));
  });
  const more = points.length > SWEEP_MOST_LINES ? ` The first ${SWEEP_MOST_LINES} of ${points.length} points; view.table() in Python has all.` : "";
  const words = sweepIntervalWords(points.map((point) => point.n));
  view.table.replaceChildren(make("p", { class: "lw-sweep-note" }, `Medians over repeats${words ? `; low to high: ${words}` : ""}; n is the number of repeats.${more}`),
    make("div", { class: "lw-sweep-scroll", tabindex: "0", role: "region", "aria-label": "The points as a table" },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, make("bdi", {}, head))))), make("tbody", {}, ...lines))));
}

function sweepNotes(view, kept) {
  const { data, choice, points } = view, said = [...data.notes];
  const counts = [...new Set(points.map((point) => point.n))].filter(Boolean);
  if (counts.length === 1 && counts[0] === 1) said.push("One repeat per point (n = 1): there is no interval.");
  else if (counts.includes(1)) said.push("A point without a bar has one repeat (n = 1).");
  const merged = sweepMerged(data, choice, kept);
  if (merged.length) said.push(`Each point is a median over ${merged.join(", ")} as well: split or filter by it.`);
  const lost = points.reduce((sum, point) => sum + point.lost, 0);
  if (lost) said.push(`${lost} ${lost === 1 ? "row has" : "rows have"} no ${data.columns[choice.y].title}, and no part in a median.`);
  const values = data.columns[choice.x].label_values;
  const hidden = points.filter((point) => (choice.log_x && values && values[point.x] !== null && values[point.x] <= 0) || (choice.log_y && point.median <= 0)).length;
  if (hidden) said.push(`${hidden} points at or below 0 have no place on a logarithmic axis; the table has them.`);
  if (choice.log_x && !values) said.push(`${data.columns[choice.x].title} has no numbers: its axis stays as it is.`);
  const panels = new Set(points.map((point) => point.facet)).size;
  if (panels > SWEEP_MOST_PANELS) said.push(`${SWEEP_MOST_PANELS} of ${panels} panels are drawn; filter by ${data.columns[choice.facet].title} for others.`);
  view.notes.replaceChildren(...said.map((text) => make("p", { class: "lw-sweep-note" }, text)));
}

// the arrow keys walk over the points: along a series, or to the nearest one of the next
function sweepWalk(view, event) {
  const marks = [...view.panels.querySelectorAll(".lw-sweep-point")], at = marks.indexOf(event.target);
  if (at < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
  const here = view.points[event.target.dataset.point], of = (mark) => view.points[mark.dataset.point];
  const isMine = (mark) => of(mark).series === here.series && of(mark).facet === here.facet;
  const beside = (step) => { const next = marks[at + step]; return next && isMine(next) ? next : null; };
  const across = (step) => {
    let next = at;
    while (marks[next] && isMine(marks[next])) next += step;
    if (!marks[next]) return null;
    const there = marks.filter((mark) => of(mark).series === of(marks[next]).series && of(mark).facet === of(marks[next]).facet);
    return there.reduce((best, mark) => (Math.abs(of(mark).x - here.x) < Math.abs(of(best).x - here.x) ? mark : best));
  };
  const to = { ArrowLeft: () => beside(-1), ArrowRight: () => beside(1), ArrowUp: () => across(-1), ArrowDown: () => across(1),
    Home: () => marks[0], End: () => marks.at(-1) }[event.key];
  if (!to) return;
  event.preventDefault();
  to()?.focus();
}

function sweepPointed(view, mark) {
  for (const row of view.table.querySelectorAll(".lw-current")) row.classList.remove("lw-current");
  view.tip.hidden = !mark;
  if (!mark) return;
  view.table.querySelector(`tr[data-point="${mark.dataset.point}"]`)?.classList.add("lw-current");
  view.tip.textContent = mark.getAttribute("aria-label");
  const box = view.panels.getBoundingClientRect(), hit = mark.querySelector(".lw-sweep-hit").getBoundingClientRect();
  const x = hit.left - box.left + 24, y = hit.bottom - box.top + 2;
  view.tip.style.left = `${clamp(x, 0, Math.max(0, box.width - view.tip.offsetWidth - 4))}px`;
  view.tip.style.top = `${y}px`;
}

function sweepPanels(view) {
  const { data, choice } = view, room = view.panels.clientWidth;
  if (!room) return;
  // of this view: a page may have several
  const held = view.panels.contains(document.activeElement) ? document.activeElement.closest(".lw-sweep-point")?.dataset.point : undefined;
  const facets = [...new Set(view.points.map((point) => point.facet))].slice(0, SWEEP_MOST_PANELS);
  const columns = facets.length === 1 ? 1 : Math.max(1, Math.floor(room / 400)), width = Math.floor(room / Math.min(columns, facets.length)) - (columns > 1 ? 12 : 0);
  const shown = view.points.filter((point) => view.shown.has(point.series));
  view.panels.replaceChildren(...facets.map((facet) => {
    const chart = sweepPanel(view, shown.filter((point) => point.facet === facet), shown, Math.min(width, 1100));
    const name = choice.facet ? make("div", { class: "lw-label" }, `${data.columns[choice.facet].title}: `, make("bdi", {}, data.columns[choice.facet].said[facet])) : "";
    return make("div", { class: "lw-sweep-panel" }, name, chart);
  }), view.tip);
  const first = view.panels.querySelector(`.lw-sweep-point[data-point="${held}"]`) ?? view.panels.querySelector(".lw-sweep-point");
  first?.setAttribute("tabindex", "0");
  if (held !== undefined) first?.focus({ preventScroll: true });
  else sweepPointed(view, null);
}

function sweepDraw(view) {
  const { data, choice } = view, kept = data.rows ? sweepKept(data, choice.filters) : [];
  const nothing = !data.rows ? "There are no points to show: the table is empty." : !choice.y ? "There are no points to show: no column holds numbers to draw."
    : !choice.x || !data.columns[choice.x].codes ? `There are no points to show: ${choice.x || "no column"} cannot be the x axis.`
    : !kept.length ? `No row is left: the filters exclude all ${data.rows}.` : "";
  for (const sync of view.sync) sync();
  view.empty.textContent = nothing;
  for (const part of [view.legend, view.panels, view.table]) part.hidden = Boolean(nothing);
  if (nothing) { view.points = []; view.notes.replaceChildren(...data.notes.map((text) => make("p", { class: "lw-sweep-note" }, text))); return; }
  view.points = sweepPoints(data, choice, kept);
  sweepLegend(view);
  sweepNotes(view, kept);
  sweepTable(view);
  sweepPanels(view);
}

function sweepControls(view) {
  const splits = sweepSplits(view.data), few = sweepSplits(view.data, SWEEP_MOST_SERIES), measures = sweepMeasures(view.data), { x, series, facet } = view.choice;
  // what was chosen in Python can be chosen here too, even if it does not vary
  const withOwn = (name, among) => (name && !among.some((one) => one.name === name) ? [view.data.columns[name], ...among] : among);
  return make("div", { class: "lw-controls" }, sweepSelect(view, "x", "x", withOwn(x, splits)), sweepToggle(view, "log x", "log_x"), sweepSelect(view, "y", "y", measures), sweepToggle(view, "log y", "log_y"),
    sweepSelect(view, "curves", "series", withOwn(series, few), true), sweepSelect(view, "panels", "facet", withOwn(facet, few), true), sweepFilters(view));
}

function renderSweep({ model, el }) {
  const view = { model, data: sweepData(model), sync: [], points: [], shown: new Set(), mostSeries: model.get("most_series"), choice: {} };
  const guarded = (call) => (...given) => { try { return call(...given); } catch (error) { showError(el, error); } };
  const read = () => { for (const name of SWEEP_CHOICES) view.choice[name] = model.get(name); };
  read();
  view.empty = make("p", { class: "lw-sweep-empty", role: "status" });
  view.legend = make("div", { class: "lw-sweep-key" });
  view.panels = make("div", { class: "lw-sweep-panels" });
  view.table = make("div", { class: "lw-sweep-table" });
  view.notes = make("div", {});
  view.tip = make("div", { class: "lw-tip", hidden: true, "aria-hidden": "true" });
  view.drawPanels = guarded(() => sweepPanels(view));
  let own = false;
  view.choose = guarded((change) => {
    own = true;
    for (const [name, value] of Object.entries(change)) { view.choice[name] = value; model.set(name, value); }
    own = false;
    model.save_changes();
    sweepDraw(view);
  });
  const root = make("div", { class: "lw lw-sweep" }, make("div", { class: "lw-head" }, make("div", { class: "lw-title", role: "heading", "aria-level": "2" }, model.get("title"))),
    sweepControls(view), view.empty, view.legend, view.panels, view.notes, view.table);
  view.panels.addEventListener("keydown", guarded((event) => sweepWalk(view, event)));
  view.panels.addEventListener("focusin", guarded((event) => {
    for (const mark of view.panels.querySelectorAll('.lw-sweep-point[tabindex="0"]')) mark.setAttribute("tabindex", "-1");
    const mark = event.target.closest(".lw-sweep-point");
    mark?.setAttribute("tabindex", "0");
    sweepPointed(view, mark);
  }));
  view.panels.addEventListener("focusout", guarded(() => sweepPointed(view, null)));
  view.panels.addEventListener("pointerover", guarded((event) => sweepPointed(view, event.target.closest(".lw-sweep-point"))));
  view.panels.addEventListener("pointerleave", guarded(() => sweepPointed(view, null)));
  el.replaceChildren(root);
  const changed = guarded(() => { if (own) return; read(); sweepDraw(view); });
  for (const name of SWEEP_CHOICES) model.on(`change:${name}`, changed);
  const ended = followTheme(model, root, guarded((theme) => { view.theme = theme; sweepDraw(view); }));
  let width = 0;
  const sizes = new ResizeObserver(guarded(() => { if (view.panels.clientWidth !== width) { width = view.panels.clientWidth; if (view.points.length) sweepPanels(view); } }));
  sizes.observe(view.panels);
  return () => { ended(); sizes.disconnect(); for (const name of SWEEP_CHOICES) model.off(`change:${name}`, changed); };
}
