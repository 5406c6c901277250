// View "explore", third part: what stands around the map: controls, adapters, readout, selection, text.

const WHO_LEADS = "who leads";
const HELP = "Wheel or pinch to zoom (click the map first, or hold Ctrl), drag to move; drag the strip above the map, or Shift and drag, to select. "
  + "Keys: arrows, Page Up/Down, Home, End; + and − zoom, 0 shows all, Enter zooms to the selection; Shift extends it, Escape ends it.";

// how far a shown value may be from the recorded one, in words
function precision(data, slab) {
  const { scale, codes } = data;
  const step = scale.log ? `±${(100 * ((scale.high / scale.low) ** (0.5 / codes.steps) - 1)).toFixed(1)} %`
    : `±${((scale.high - scale.low) * 0.5 / codes.steps).toFixed(3)}`;
  const pooled = [slab.block > 1 ? `${slab.block} tokens` : "", slab.rows < data.numSites ? "several sites" : ""].filter(Boolean).join(" and ");
  return pooled ? `mean of ${pooled}, ${step}` : `rounded to ${step}`;
}

function filterOf(model, data) {
  const wanted = model.get("shown_adapters") ?? [], projection = model.get("projection") ?? "", [low, high] = model.get("layers") ?? [];
  const { layers, kinds } = data.rows;
  let adapters = data.names.flatMap((name, i) => (wanted.includes(name) ? [i] : []));
  if (!adapters.length) adapters = data.names.map((_, i) => i);
  const isShown = (site) => (!projection || kinds[site] === projection)
    && (low === undefined || (layers[site] !== null && layers[site] >= low && layers[site] <= high));
  const found = [...Array(data.numSites).keys()].filter(isShown), sites = found.length ? found : [...Array(data.numSites).keys()];
  const groups = [];
  for (const site of sites) {
    const known = groups.find(({ layer }) => layer === layers[site]);
    if (known) known.sites.push(site);
    else groups.push({ layer: layers[site], sites: [site] });
  }
  const where = [projection && `every ${projection}`, low !== undefined && `layers ${low}–${high}`].filter(Boolean).join(", ");
  // a question names what it is about: the settings may reach Python after it
  const asked = { adapters: adapters.map((i) => data.names[i]), projection: found.length ? projection : "", layers: found.length && low !== undefined ? [low, high] : [] };
  return { adapters, sites, layers: groups, asked, key: `${adapters};${sites}`,
    where: !found.length ? `at every site (none is ${where})` : where ? `at ${where}` : "at every site" };
}

function exploreControls(view) {
  const { data, model } = view, bar = [];
  const pick = (label, name, options) => {
    const list = make("select", { onchange: (event) => { model.set(name, options[event.target.selectedIndex].value); model.save_changes(); } },
      ...options.map(({ value, text }) => make("option", { selected: value === model.get(name) }, text)));
    return make("label", { class: "lw-choice" }, `${label} `, list);
  };
  const requests = data.requests ?? [];
  if (requests.length > 1) bar.push(pick("Request", "request", requests));
  if (data.quantities.length > 1) bar.push(pick("Value", "quantity", data.quantities));
  const adapters = data.names.map((name, i) => ({ value: name, text: `${data.keys[i]} ${data.adapters[i]}`, colour: data.colours[i] }));
  const modes = data.numAdapters > 1 ? [{ value: WHO_LEADS, text: WHO_LEADS }, { value: EVERY, text: EVERY }] : [];
  bar.push(choice(view, "Map", "mode", [...modes, ...adapters]));
  const kinds = [...new Set(data.rows.kinds)];
  if (kinds.length > 1) bar.push(choice(view, "Sites", "projection", [{ value: "", text: "all" }, ...kinds.map((kind) => ({ value: kind, text: kind }))]));
  const layers = [...new Set(data.rows.layers)].filter((layer) => layer !== null).sort((a, b) => a - b);
  if (layers.length > 1) bar.push(layerChoice(view, layers));
  const button = (text, label, call) => make("button", { class: "lw-button", type: "button", "aria-label": label, title: label, onclick: () => view.guard(call) }, text);
  bar.push(make("div", { class: "lw-zoom", role: "group", "aria-label": "Zoom" }, button("−", "Zoom out", () => view.zoomBy(1 / 1.6)), button("+", "Zoom in", () => view.zoomBy(1.6)),
    button("All", "Show all tokens", view.showAll)));
  return bar;
}

function layerChoice(view, layers) {
  const now = view.model.get("layers") ?? [];
  const list = (label, value) => make("select", { "aria-label": label }, ...layers.map((layer) => make("option", { selected: layer === value }, String(layer))));
  const low = list("First layer", now[0] ?? layers[0]), high = list("Last layer", now[1] ?? layers.at(-1));
  const changed = (event) => {
    if (low.selectedIndex > high.selectedIndex) (event.target === low ? high : low).selectedIndex = event.target.selectedIndex;
    const [a, b] = [layers[low.selectedIndex], layers[high.selectedIndex]];
    const wanted = a === layers[0] && b === layers.at(-1) ? [] : [a, b];
    view.layers = wanted.join();
    view.setting("layers", wanted);
  };
  for (const one of [low, high]) one.addEventListener("change", changed);
  return make("fieldset", { class: "lw-choice" }, make("legend", {}, "Layers"), low, " to ", high);
}

const nameCell = (data, adapter) => [swatch(data.colours[adapter]), make("b", {}, data.keys[adapter]), " ", make("bdi", {}, data.adapters[adapter])];
const barCell = (data, adapter, part) => make("td", { class: "lw-bar-cell" }, shareBar(part, data.colours[adapter]));

// the legend is the adapter filter: what is not ticked is left out of every mean, lead and table
function adapterPanel(view) {
  const { data, model } = view, parts = Object.keys(data.shares).filter((part) => data.shares[part]), body = make("tbody"), boxes = [];
  const isScaling = data.quantity === "scalings", say = (share) => (share == null ? "–" : isScaling ? percent(share) : share > 0 && share < 0.0005 ? "< .001" : share.toFixed(3));
  const tell = () => {
    const names = data.names.filter((_, i) => boxes[i].checked);
    if (names.length) view.setting("shown_adapters", names);
  };
  data.adapters.forEach((_, i) => {
    const box = make("input", { type: "checkbox", checked: view.filter.adapters.includes(i), onchange: () => {
      // the last one stays: a map of nothing says nothing
      if (!boxes.some(({ checked }) => checked)) box.checked = true;
      tell();
    } });
    boxes.push(box);
    body.append(make("tr", {}, make("th", { scope: "row", title: data.adapters[i] }, make("label", {}, box, ...nameCell(data, i))),
      barCell(data, i, partOfScale(data, data.shares.all[i])), ...parts.map((part) => make("td", {}, say(data.shares[part][i])))));
  });
  view.tick = () => boxes.forEach((box, i) => { box.checked = view.filter.adapters.includes(i); });
  const only = (chosen) => { boxes.forEach((box, i) => { box.checked = chosen.includes(i); }); tell(); };
  const order = data.adapters.map((_, i) => i).sort((a, b) => (data.shares.all[b] ?? 0) - (data.shares.all[a] ?? 0));
  const buttons = make("div", { class: "lw-zoom" }, make("button", { class: "lw-button", type: "button", onclick: () => only(order) }, "all"),
    data.numAdapters > 2 ? make("button", { class: "lw-button", type: "button", onclick: () => only(order.slice(0, data.numAdapters > 8 ? 5 : 2)) }, `the ${data.numAdapters > 8 ? 5 : 2} largest`) : "");
  const table = make("table", { class: "lw-shares" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "adapter"), make("td"),
    ...parts.map((part) => make("th", { scope: "col" }, part)))), body);
  const scroll = make("div", { class: "lw-scroll", tabindex: data.numAdapters > 9 ? "0" : undefined, role: "group", "aria-label": "Adapters: shown or not, and their means" }, table);
  return make("section", { class: "lw-card lw-adapters" }, make("div", { class: "lw-label" }, isScaling ? "Adapters and their mean share" : "Adapters and their mean"), scrollable(scroll), data.numAdapters > 1 ? buttons : "");
}

function valueTable(view, columns) {
  const { data, filter } = view;
  let order = filter.adapters.map((_, k) => k);
  const first = columns[0].values;
  if (order.length > 12) order = order.sort((a, b) => (first[b] || 0) - (first[a] || 0)).slice(0, 12);
  const head = make("tr", {}, make("th", { scope: "col" }, order.length < filter.adapters.length ? `${order.length} of ${filter.adapters.length}` : "adapter"), make("td"),
    ...columns.map(({ name }) => make("th", { scope: "col" }, name)));
  return make("table", { class: "lw-shares" }, make("thead", {}, head), make("tbody", {}, ...order.map((k) => make("tr", {},
    make("th", { scope: "row" }, ...nameCell(data, filter.adapters[k])), barCell(data, filter.adapters[k], partOfScale(data, first[k])),
    ...columns.map(({ name, values, texts }) => make("td", { [`data-${name}`]: filter.adapters[k] }, texts ? texts[k] : textOfValue(data, values[k])))))));
}

function sayExactness({ data, filter }, exact, site, slab) {
  if (exact) return "Values exact.";
  if (!hasExactMeans(data, filter)) return `Values ${precision(data, slab)}.`;
  return site === undefined ? "Means exact." : `Means exact; here ${precision(data, slab)}.`;
}

function exploreReadout(view) {
  const { data } = view, token = make("bdi", { class: "lw-now" }), place = make("span"), status = make("div", { class: "lw-status" });
  const site = make("div", { class: "lw-site" }), values = make("div", { class: "lw-readings" });
  let asking = 0;
  const fill = ({ token: at, site: where }, exact) => {
    const { filter } = view, means = exact?.means ?? filter.adapters.map((_, k) => meanOf(data, filter, at, k));
    const columns = [{ name: "mean", values: means, texts: exact && means.map((one) => textOfValue(data, one, 4)) }];
    if (where !== undefined) {
      const codes = filter.adapters.map((adapter) => codeAt(data, at, where, adapter));
      columns.push({ name: "here", texts: exact ? exact.values.map((one) => textOfValue(data, one, 4)) : codes.map((code) => textOfCode(data, code)) });
    }
    values.replaceChildren(valueTable(view, columns));
    site.textContent = `${where === undefined ? "Point at a cell for a single site." : `here = ${data.rows.labels[where]}`} ${sayExactness(view, exact, where, slabAt(data, at))}`;
  };
  view.read = () => {
    const now = view.current();
    token.textContent = data.tokens[now.token].trimEnd() || "␣".repeat(data.tokens[now.token].length) || "no text";
    place.textContent = `token ${data.positions[now.token]}`;
    status.textContent = statusOf(data, now.token);
    fill(now, null);
    clearTimeout(asking);
    if (!data.live) return;
    asking = setTimeout(() => view.ask("cell", { token: now.token, site: now.site ?? null, turn: view.turn, ...view.filter.asked }, (answer) => {
      const { token: at, site: where } = view.current();
      if (at === answer.token && (where ?? null) === answer.site && answer.turn === view.turn) fill(now, answer);
    }), 70);
  };
  view.leaveReadout = () => clearTimeout(asking);
  return make("section", { class: "lw-card lw-reading" }, make("div", { class: "lw-label" }, token, " ", place), status, values, site);
}

function selectionPanel(view) {
  const { data } = view, title = make("div", { class: "lw-label" }), text = make("bdi", { class: "lw-span" }), table = make("div"), note = make("div", { class: "lw-site" });
  const scroll = make("div", { class: "lw-span-box", tabindex: "0", role: "group", "aria-label": "The selected text" }, text);
  const button = (name, call) => make("button", { class: "lw-button", type: "button", onclick: () => view.guard(call) }, name);
  const parts = [scrollable(scroll), table, note, make("div", { class: "lw-zoom" }, button("Zoom to it", view.zoomToSelection), button("Clear", () => view.select(null)))];
  const panel = make("section", { class: "lw-card lw-selection" }, title, ...parts);
  let asking = 0;
  const fill = (means, exact) => {
    table.replaceChildren(valueTable(view, [{ name: "mean", values: means, texts: exact && means.map((one) => textOfValue(data, one, 4)) }]));
    note.textContent = `Means ${view.filter.where}${exact || hasExactMeans(data, view.filter) ? ", exact" : `, ${precision(data, slabAt(data, view.selection[0]))}`}. ${data.live ? "In Python: view.selected() is the table of the exact values." : ""}`;
  };
  view.readSelection = () => {
    const { selection } = view, isEmpty = !selection.length;
    for (const part of parts) part.hidden = isEmpty;
    clearTimeout(asking);
    if (isEmpty) {
      title.textContent = "No selection";
      parts[2].hidden = false;
      note.textContent = "Drag over the strip above the map, or press Shift and an arrow key on the map.";
      return;
    }
    const [start, stop] = selection, shown = Math.min(stop, start + 3000);
    title.textContent = `Selected: ${stop - start} ${stop - start === 1 ? "token" : "tokens"}, ${data.positions[start]} to ${data.positions[stop - 1]}`;
    text.textContent = data.tokens.slice(start, shown).join("") + (shown < stop ? ` … and ${stop - shown} tokens more` : "");
    fill(spanMeans(data, view.filter, start, stop), false);
    if (data.live) asking = setTimeout(() => view.ask("span", { start, stop, turn: view.turn, ...view.filter.asked }, (answer) => {
      if (view.selection[0] === answer.start && view.selection[1] === answer.stop && answer.turn === view.turn) fill(answer.means, true);
    }), 90);
  };
  view.leaveSelection = () => clearTimeout(asking);
  return panel;
}

// The text of the visible tokens, or of those around the cursor where more are visible than anyone reads.
function exploreText(view) {
  const { data } = view, most = 600, box = make("div", { class: "lw-text", tabindex: "0", role: "group", "aria-label": "The text of the visible tokens" });
  const title = make("div", { class: "lw-label" });
  let range = "", anchor = null;
  const tokenOf = (event) => event.target.closest?.("[data-token]")?.dataset.token;
  const on = (name, call) => box.addEventListener(name, (event) => view.guard(() => tokenOf(event) !== undefined && call(Number(tokenOf(event)), event)));
  on("pointerover", (token, event) => { view.point({ token }); if (anchor !== null && event.buttons) view.drag(anchor, token); });
  on("pointerdown", (token) => { anchor = token; });
  on("click", (token) => view.move({ token }, true));
  box.addEventListener("pointerleave", () => { anchor = null; view.point(null); });
  view.markText = () => {
    const { token } = view.current(), [start, stop] = view.selection;
    for (const span of box.querySelectorAll("[data-token]")) {
      const at = Number(span.dataset.token);
      span.classList.toggle("lw-current", at === token);
      span.classList.toggle("lw-chosen", at >= start && at < stop);
    }
  };
  view.writeText = (force) => {
    const g = view.geometry, { cursor, filter } = view;
    if (!g) return;
    let first = Math.floor(g.first), last = Math.ceil(g.last);
    if (last - first > most) {
      const middle = cursor.token >= first && cursor.token < last ? cursor.token : (first + last) >> 1;
      [first, last] = [clamp(middle - most / 2, 0, data.numTokens), clamp(middle + most / 2, 0, data.numTokens)];
    }
    if (!force && range === `${first} ${last}`) return;
    range = `${first} ${last}`;
    title.textContent = first === 0 && last === data.numTokens ? "Text" : `Text of tokens ${data.positions[first]} to ${data.positions[last - 1]}`;
    box.replaceChildren();
    let before = null;
    for (let token = first; token < last; token++) {
      const [leader, lead] = leadAt(data, filter, token), text = data.tokens[token], isStart = data.parts.some(([start]) => start === token);
      if (isStart || token === first) box.append(make("span", { class: "lw-part" }, data.generated[token] ? "generated" : "prompt"));
      const kind = data.source[token] < 0 ? "none" : data.source[token] === data.positions[token] ? "computed" : "reused";
      box.append(make("bdi", { class: `lw-token lw-${kind}`, "data-token": token, "data-key": leader >= 0 && (leader !== before || isStart) && filter.adapters.length > 1 ? data.keys[leader] : undefined,
        style: leader < 0 ? undefined : `--lw-c:${data.colours[leader]};--lw-o:${lead.toFixed(3)}` }, text.endsWith("\n") ? text.slice(0, -1) : text), text.endsWith("\n") ? "\n" : "");
      before = leader;
    }
    view.markText();
  };
  return make("div", { class: "lw-reading-text" }, title, scrollable(box));
}

function exploreScale(view) {
  const { data } = view, { low, high } = data.scale, bar = make("span", { class: "lw-scale-bar" });
  view.paintScale = () => { bar.style.background = `linear-gradient(90deg, ${view.theme.scale.join(",")})`; };
  const marks = make("span", {}, make("span", { class: "lw-nan" }), " no value", make("span", { class: "lw-solid" }), " computed", make("span", { class: "lw-striped" }), " reused");
  if (data.outside[0]) marks.append(make("span", { class: "lw-above" }, " ▲ "), `above ${high}`);
  if (data.outside[1]) marks.append(make("span", { class: "lw-below" }, " ▼ "), `below ${low}`);
  return make("div", { class: "lw-scale" }, make("span", {}, data.scale.log ? `≤ ${low}` : "0"), bar, make("span", {}, high.toFixed(1)), marks,
    make("p", {}, [data.meaning, ...data.notes].join(" ")), make("details", { class: "lw-help" }, make("summary", {}, "Pointer and keys"), make("p", {}, HELP)));
}
