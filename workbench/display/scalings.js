// View "scalings", last part: pointing, the cursor, and the whole put together.

const WATCHED = ["values", "tokens", "shape", "title", "facts"];

function heatmap(view) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  const spacer = make("div", { class: "lw-spacer" }, canvas);
  const scroller = make("div", { class: "lw-map", tabindex: "0", role: "group",
    "aria-label": "Heatmap: tokens across; adapters, then sites, down. Arrow keys move; values are read out." }, spacer);
  const tip = make("div", { class: "lw-tip", hidden: true, "aria-hidden": "true" });
  Object.assign(view, { canvas, spacer, scroller, tip });
  scroller.addEventListener("scroll", () => view.draw());
  canvas.addEventListener("pointermove", (event) => hover(view, event));
  canvas.addEventListener("pointerleave", () => view.point(null));
  canvas.addEventListener("click", (event) => hover(view, event) && view.move(view.current(), true));
  scroller.addEventListener("keydown", (event) => {
    const { token, row } = view.cursor, { rows } = view.geometry, at = rows.indexOf(row), last = view.data.numTokens - 1;
    const to = { ArrowLeft: { token: token - 1 }, ArrowRight: { token: token + 1 }, Home: { token: 0 }, End: { token: last },
      ArrowUp: { row: rows[Math.max(at - 1, 0)] }, ArrowDown: { row: rows[Math.min(at + 1, rows.length - 1)] } }[event.key];
    if (!to || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    view.move({ token: clamp(to.token ?? token, 0, last), row: to.row ?? row }, true);
  });
  return make("div", { class: "lw-map-box" }, scroller, tip);
}

function hover(view, event) {
  const g = view.geometry, { data, tip } = view;
  const box = view.canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
  const token = Math.floor((x - g.gutter + g.shift) / g.cell);
  if (x < g.gutter || token < 0 || token >= data.numTokens) return view.point(null);
  const adapter = y >= g.top ? Math.floor((y - g.top) / g.rowA) : -1;
  const row = y >= g.sites && y < g.bottom ? g.rows[Math.floor((y - g.sites) / g.rowB)] : undefined;
  view.point({ token, row });
  let said = data.labels[token];
  if (row !== undefined) {
    const shown = view.adapter === LEADER ? leaderAt(data, token, row)[0] : view.adapter;
    said = `${data.rows.labels[row]}: ${shown < 0 ? "no value" : `${data.adapters[shown]} ${valueAt(data, token, row, shown)}`}`;
  } else if (adapter >= 0 && adapter < data.numAdapters) {
    const mean = meanAt(data, token, adapter);
    said = `${data.adapters[adapter]}, mean ${Number.isNaN(mean) ? "–" : mean.toFixed(3)}`;
  }
  tip.textContent = said;
  tip.hidden = false;
  tip.style.left = `${clamp(x + 14, 0, Math.max(0, g.width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 18}px`;
  return true;
}

function scaleBar(view) {
  const { data } = view;
  const bar = make("span", { class: "lw-scale-bar" });
  view.paintScale = () => { bar.style.background = `linear-gradient(90deg, ${view.theme.scale.join(",")})`; };
  const marks = make("span", {}, make("span", { class: "lw-nan" }), " no value", make("span", { class: "lw-solid" }), " computed",
    make("span", { class: "lw-striped" }), " reused");
  if (data.outliers.size) marks.append(make("span", { class: "lw-above" }, " ▲ "), "above 1", make("span", { class: "lw-below" }, " ▼ "), "below 0");
  return make("div", { class: "lw-scale" }, make("span", {}, "0"), bar, make("span", {}, "1.0"), marks, make("p", {}, [data.note, ...data.notes].join(" ")));
}

function createView(model, data) {
  const view = { model, data, adapter: model.get("adapter") ?? LEADER, site_group: model.get("site_group") ?? "" };
  view.cursor = { token: 0, row: undefined };
  view.hovered = null;
  view.current = () => view.hovered ?? view.cursor;
  let waiting = 0, marked = null;
  view.drawNow = () => view.guard(() => draw(view));
  view.draw = () => { waiting ||= requestAnimationFrame(() => { waiting = 0; view.drawNow(); }); };
  const refresh = () => {
    marked?.classList.remove("lw-current");
    marked = view.spans[view.current().token];
    marked.classList.add("lw-current");
    view.read(view.current());
    view.draw();
  };
  view.point = (place) => { view.hovered = place; if (!place) view.tip.hidden = true; refresh(); };
  view.move = (place, tell) => {
    view.spans[view.cursor.token].tabIndex = -1;
    view.cursor = { ...view.cursor, ...place };
    view.spans[view.cursor.token].tabIndex = 0;
    for (const span of [marked, view.spans[view.cursor.token]]) span?.setAttribute("aria-selected", span === view.spans[view.cursor.token]);
    view.hovered = null;
    refresh();
    if (!tell) return;
    view.reveal();
    model.set("selection", [view.cursor.token, view.cursor.token + 1]);
    model.save_changes();
  };
  view.reveal = () => {
    const { scroller, geometry: g, text } = view, span = view.spans[view.cursor.token], x = view.cursor.token * (g?.cell ?? 0);
    if (g && (x < scroller.scrollLeft || x + g.cell > scroller.scrollLeft + g.width - g.gutter)) scroller.scrollLeft = x - (g.width - g.gutter) / 2;
    const top = span.offsetTop - text.offsetTop;
    if (top < text.scrollTop || top + 28 > text.scrollTop + text.clientHeight) text.scrollTop = top - text.clientHeight / 2;
  };
  return view;
}

function build(model, el, fail) {
  const view = createView(model, readModel(model)), { data } = view;
  view.guard = (call) => { try { return call(); } catch (error) { fail(error); } };
  view.text = textPanel(view);
  const side = make("div", { class: "lw-side" }, legend(data), readout(view));
  const maps = make("div", { class: "lw-maps" }, controls(view), heatmap(view), scaleBar(view));
  const text = make("div", { class: "lw-text-box" }, scrollable(view.text));
  const root = make("div", { class: "lw lw-scalings" }, header(data), text, side, maps);
  view.leave = followTheme(model, root, (theme) => view.guard(() => {
    view.theme = theme;
    view.table = colourTable(view);
    view.paintScale();
    view.draw();
  }));
  view.move({ token: 0 });
  el.replaceChildren(root);
  return view;
}

function renderScalings({ model, el }) {
  const fail = (error) => showError(el, error);
  let view = null;
  const sizes = new ResizeObserver(() => view?.draw());
  const leave = () => { view?.leave(); sizes.disconnect(); };
  const rebuild = () => {
    leave();
    try { view = build(model, el, fail); sizes.observe(view.scroller); } catch (error) { fail(error); }
  };
  for (const name of WATCHED) model.on(`change:${name}`, rebuild);
  rebuild();
  return () => {
    for (const name of WATCHED) model.off(`change:${name}`, rebuild);
    leave();
  };
}
