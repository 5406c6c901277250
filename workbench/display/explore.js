// View "explore", last part: moving, zooming, pointing, selecting and keys, and the whole put together.

const IS_LOADED = ["labels"];
const SETTINGS = ["shown_adapters", "projection", "layers", "mode", "selection", "visible", "problem", "request", "quantity"];
const SILENT = "The kernel does not answer: showing the overview, its values rounded. This goes on by itself once the kernel is free; after a restart, run the cell again.";

function exploreView(model, data, guard) {
  const view = { model, data, guard, hovered: null, tip: null };
  view.cursor = { token: 0, site: undefined };
  view.current = () => view.hovered ?? view.cursor;
  view.filter = filterOf(model, data);
  view.turn = 0;
  view.selection = [...model.get("selection") ?? []];
  view.mode = model.get("mode") || WHO_LEADS;
  view.projection = model.get("projection") ?? "";
  view.layers = (model.get("layers") ?? []).join();
  view.scratch = make("canvas", { width: 1, height: 1 });
  let frame = 0, later = 0;
  view.drawNow = () => guard(() => {
    // Jupyter renders before it lays out, in a closed tab long before
    if (!drawExplore(view)) return;
    // what is under a resting pointer has changed
    if (view.pointer && view.geometry) hoverExplore(view, placeOf(view, view.pointer));
    settleLater();
  });
  view.draw = () => { frame ||= requestAnimationFrame(() => { frame = 0; view.drawNow(); }); };
  const settleLater = () => { clearTimeout(later); later = setTimeout(() => guard(() => { wantWindow(view); view.writeText(); tellVisible(view); }), 120); };
  view.setting = (name, value) => { model.set(name, value); model.save_changes(); };
  view.heading = () => {
    const index = data.names.indexOf(view.mode), what = data.quantity === "scalings" ? "" : "Output moved: ", panels = view.geometry?.panels?.length ?? 0;
    if (view.mode === EVERY) return `${what}Every adapter, means ${view.filter.where === "at every site" ? "of each layer, the first on top" : `of each layer, ${view.filter.where}`}${panels && panels < view.filter.adapters.length ? ` (the ${panels} largest)` : ""}`;
    return index < 0 ? `${what}Who leads, ${view.filter.where} (stronger = larger value)` : `${what}${data.adapters[index]}, ${view.filter.where}`;
  };
  view.leave = () => { cancelAnimationFrame(frame); clearTimeout(later); view.leaveReadout(); view.leaveSelection(); view.questions?.end(); view.stopTheme(); };
  return Object.assign(view, moves(view));
}

// everything that changes what is visible, pointed at or selected
function moves(view) {
  const goTo = (first, cell) => { Object.assign(view, { first, cell, wanted: null, isLed: false }); view.draw(); };
  const refresh = () => { view.markText(); view.read(); drawOverlay(view); };
  const point = (place) => {
    view.hovered = place;
    if (!place) view.tip.hidden = true;
    refresh();
  };
  const move = (place, announce) => {
    view.cursor = { ...view.cursor, ...place };
    view.hovered = null;
    const g = view.geometry && aimed(view), { token } = view.cursor;
    if (g && (token < g.first || token + 1 > g.last)) goTo(token - (g.last - g.first) / 2, view.cell);
    refresh();
    if (announce) view.announce(spoken(view));
  };
  return { goTo, point, refresh, move, showAll: () => goTo(0, 0), ...selecting(view), ...zooming(view, goTo), keys: (event) => exploreKeys(view, event) };
}

function selecting(view) {
  const select = (span) => {
    if (!span) view.anchor = null;
    const before = view.selection.join();
    view.selection = span ? [...span] : [];
    if (view.selection.join() === before) return;
    view.setting("selection", view.selection);
    view.markText();
    view.readSelection();
    if (view.geometry) { drawOverlay(view); drawMinimap(view); }
  };
  const extend = (token) => {
    const from = view.anchor ?? view.cursor.token;
    view.anchor = from;
    select([Math.min(from, token), Math.max(from, token) + 1]);
    view.cursor = { ...view.cursor, token };
  };
  // with the pointer: what Shift and an arrow key do next goes on from there
  const drag = (from, token) => {
    Object.assign(view, { anchor: from, cursor: { ...view.cursor, token } });
    select([Math.min(from, token), Math.max(from, token) + 1]);
  };
  return { select, extend, drag };
}

function zooming(view, goTo) {
  const zoomAbout = (token, factor) => {
    const g = aimed(view), cell = clamp(g.cell * factor, g.fit, Math.max(g.fit, MAX_CELL));
    goTo(token - ((token - g.first) * g.cell) / cell, cell);
  };
  const zoomBy = (factor) => {
    const { first, last } = aimed(view), { token } = view.cursor;
    zoomAbout(token >= first && token < last ? token + 0.5 : (first + last) / 2, factor);
  };
  const zoomToSelection = () => {
    if (!view.selection.length) return;
    const [start, stop] = view.selection, { plot } = view.geometry, margin = Math.max(1, (stop - start) * 0.04);
    goTo(start - margin, plot / (stop - start + 2 * margin));
  };
  return { zoomAbout, zoomBy, zoomToSelection };
}

function exploreKeys(view, event) {
  const { token, site } = view.cursor, { sites } = view.filter, g = aimed(view), at = sites.indexOf(site), page = Math.max(1, Math.floor(0.9 * (g.last - g.first)));
  const end = view.data.numTokens - 1;
  const to = { ArrowLeft: token - 1, ArrowRight: token + 1, PageUp: token - page, PageDown: token + page, Home: 0, End: end }[event.key];
  const lines = { ArrowUp: Math.max(at - 1, 0), ArrowDown: Math.min(at + 1, sites.length - 1) }[event.key];
  const others = { "+": () => view.zoomBy(1.6), "=": () => view.zoomBy(1.6), "-": () => view.zoomBy(1 / 1.6), 0: view.showAll, Enter: view.zoomToSelection,
    Escape: () => { view.anchor = null; view.select(null); view.announce("Selection ended"); } }[event.key];
  if (event.ctrlKey || event.metaKey || event.altKey || (to === undefined && lines === undefined && !others)) return;
  event.preventDefault();
  // Jupyter has keys of its own; these are the map's
  event.stopPropagation();
  // the keys lead now, wherever the pointer rests
  if (to !== undefined || lines !== undefined) { view.pointer = null; view.tip.hidden = true; }
  if (to !== undefined && event.shiftKey) view.extend(clamp(to, 0, end));
  if (to !== undefined && !event.shiftKey) view.anchor = null;
  if (to !== undefined) view.move({ token: clamp(to, 0, end) }, true);
  else if (lines !== undefined) view.move({ site: sites[lines] }, true);
  else others();
}

// one sentence about the cursor, for the live region
function spoken(view) {
  const { data, filter, cursor, selection } = view, { token, site } = cursor, [leader] = leadAt(data, filter, token);
  const cell = site === undefined || view.mode === EVERY ? "" : `, ${data.rows.labels[site]}: ${cellText(view, token, site)}`;
  const span = selection.length ? `; ${selection[1] - selection[0]} tokens selected` : "";
  return `Token ${data.positions[token]} ${onOneLine(data.tokens[token], 30)}: ${leader < 0 ? "no values" : `${data.adapters[leader]} leads`}${cell}${span}`;
}

function cellText(view, token, site) {
  const { data, filter, mode } = view, index = data.names.indexOf(mode), shown = index >= 0 ? index : leaderAtCell(data, filter, token, site);
  return shown < 0 ? "no value" : `${data.adapters[shown]} ${textOfCode(data, codeAt(data, token, site, shown))}`;
}

function wantWindow(view) {
  const { data, geometry: g } = view;
  if (!data.live || !g) return;
  const [start, stop] = [Math.floor(g.first), Math.ceil(g.last)], block = 2 ** Math.max(0, Math.floor(Math.log2(1 / g.cell)));
  if (data.overview.block <= block && data.overview.rows === data.numSites) return;
  if (data.windows.some((slab) => slab.start <= start && slab.stop >= stop && slab.asked <= block)) return;
  const margin = Math.ceil((stop - start) / 2);
  view.ask("window", { start: Math.max(0, start - margin), stop: Math.min(data.numTokens, stop + margin), block }, (answer, buffers) => view.guard(() => {
    const [codes, leaders, rowOf] = buffers.map((one) => bytesOf({ get: () => one }));
    data.windows = [{ ...readSlab(data, answer, codes, leaders, rowOf), asked: block }, ...data.windows].slice(0, 2);
    view.drawNow();
    view.writeText(true);
    view.read();
  }));
}

function tellVisible(view) {
  // a second view of the widget, of another width, would answer with its own
  if (view.isLed) return;
  const { first, last } = view.geometry, now = [first, last].map((one) => Math.round(one * 100) / 100);
  const all = [0, view.data.numTokens], told = view.model.get("visible") ?? [];
  if (now.join() !== (told.length ? told : all).join()) view.setting("visible", now);
}

function exploreBox(view) {
  const help = `lw-help-${Math.random().toString(36).slice(2)}`;
  Object.assign(view, { canvas: make("canvas"), over: make("canvas", { class: "lw-over" }), mini: make("canvas", { class: "lw-mini" }), tip: make("div", { class: "lw-tip", hidden: true, "aria-hidden": "true" }) });
  view.stack = make("div", { class: "lw-stack", "aria-hidden": "true" }, view.canvas, view.over);
  view.box = make("div", { class: "lw-explore-map", tabindex: "0", role: "application", "aria-roledescription": "heatmap",
    "aria-label": "Heatmap: tokens across; adapters, then sites, down. Values are read out.", "aria-describedby": help }, view.stack);
  view.help = help;
  pointing(view);
  view.box.addEventListener("keydown", (event) => view.guard(() => view.keys(event)));
  return make("div", { class: "lw-map-box" }, view.box, make("div", { class: "lw-mini-box", "aria-hidden": "true" }, view.mini), view.tip);
}

function placeOf(view, event) {
  const g = view.geometry, { data, filter } = view, frame = view.over.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
  const exact = g.first + (x - g.gutter) / g.cell, token = clamp(Math.floor(exact), 0, data.numTokens - 1);
  const place = { x, y, exact, token, inside: x >= g.gutter && exact >= 0 && exact < data.numTokens, above: y < g.map - 26 };
  if (y >= g.means && y < g.means + g.rowA * filter.adapters.length) place.mean = Math.floor((y - g.means) / g.rowA);
  if (y >= g.map && y < g.bottom && view.mode !== EVERY) place.site = filter.sites[Math.floor((y - g.map) / g.rowB)];
  if (y >= g.map && y < g.bottom && view.mode === EVERY) {
    place.mean = g.panels[Math.floor((y - g.map) / g.panel)];
    place.layer = filter.layers[Math.floor(((y - g.map) % g.panel) / g.rowB)];
  }
  return place;
}

function hoverExplore(view, place) {
  const { data, filter, tip, geometry: g } = view, { token, site, mean, layer } = place;
  if (!place.inside) return view.point(null);
  view.point({ token, site });
  const text = onOneLine(data.tokens[token], 20);
  let said = `${text} · token ${data.positions[token]}`;
  if (site !== undefined) said = `${text} · ${data.rows.labels[site]}: ${cellText(view, token, site)}`;
  else if (mean !== undefined && layer) said = `${text} · ${data.adapters[filter.adapters[mean]]}, mean of layer ${layer.layer ?? "–"}: ${textOfValue(data, meanOf(data, layerFilter(layer, filter.adapters[mean]), token, 0))}`;
  else if (mean !== undefined) said = `${text} · ${data.adapters[filter.adapters[mean]]}, mean ${textOfValue(data, meanOf(data, filter, token, mean))}`;
  tip.replaceChildren(make("bdi", {}, said));
  tip.hidden = false;
  tip.style.left = `${clamp(place.x + 14, 0, Math.max(0, g.width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${place.y + 18}px`;
}

// One pointer moves the map or selects, two zoom it; the wheel zooms once the map has the focus, so that a page with
// the view in it can be scrolled.
function pointing(view) {
  const { box, mini } = view, down = new Map();
  let drag = null;
  const on = (node, name, call, options) => node.addEventListener(name, (event) => view.guard(() => view.geometry && call(event)), options);
  on(view.over, "pointerdown", (event) => {
    if (event.button) return;
    view.pointer = null;
    const place = placeOf(view, event);
    down.set(event.pointerId, event.clientX);
    view.over.setPointerCapture?.(event.pointerId);
    const distance = down.size === 2 ? Math.abs([...down.values()][0] - [...down.values()][1]) : 0;
    drag = { kind: down.size === 2 ? "pinch" : event.shiftKey || place.above ? "select" : "move", from: place, first: view.geometry.first, cell: view.geometry.cell, distance, moved: false };
  });
  on(view.over, "pointermove", (event) => {
    const place = placeOf(view, event);
    if (!down.has(event.pointerId) || !drag) {
      view.pointer = { clientX: event.clientX, clientY: event.clientY };
      return hoverExplore(view, place);
    }
    down.set(event.pointerId, event.clientX);
    if (Math.abs(place.x - drag.from.x) + Math.abs(place.y - drag.from.y) >= 4) drag.moved = true;
    if (!drag.moved) return;
    view.tip.hidden = true;
    if (drag.kind === "select") view.drag(drag.from.token, place.token);
    else if (drag.kind === "move") view.goTo(drag.first - (place.x - drag.from.x) / drag.cell, drag.cell);
    else if (down.size === 2) {
      const [one, other] = down.values(), left = view.over.getBoundingClientRect().left, middle = (one + other) / 2 - left, { gutter } = view.geometry;
      const cell = (drag.cell * Math.max(8, Math.abs(one - other))) / Math.max(8, drag.distance), token = drag.first + (middle - gutter) / drag.cell;
      view.goTo(token - (middle - gutter) / Math.max(cell, view.geometry.fit), cell);
    }
  });
  const up = (event) => {
    if (!down.delete(event.pointerId) || !drag) return;
    if (!drag.moved && event.type === "pointerup" && drag.from.inside) {
      view.anchor = null;
      if (drag.kind === "select" && event.shiftKey) view.drag(view.cursor.token, drag.from.token);
      view.move({ token: drag.from.token, site: drag.from.site ?? view.cursor.site }, true);
    }
    if (!down.size) drag = null;
  };
  for (const name of ["pointerup", "pointercancel"]) on(view.over, name, up);
  on(view.over, "pointerleave", () => { view.pointer = null; view.point(null); });
  on(box, "wheel", (event) => {
    const isPinch = event.ctrlKey || event.metaKey, across = Math.abs(event.deltaX) > Math.abs(event.deltaY), unit = event.deltaMode === 1 ? 16 : 1;
    if (!isPinch && !across && !box.matches(":focus")) return;
    event.preventDefault();
    const { first, cell, gutter } = aimed(view);
    if (across || event.shiftKey) view.goTo(first + (unit * (across ? event.deltaX : event.deltaY)) / cell, cell);
    else view.zoomAbout(first + (placeOf(view, event).x - gutter) / cell, Math.exp(-unit * event.deltaY * (isPinch ? 0.01 : 0.002)));
  }, { passive: false });
  const jump = (event) => {
    const g = aimed(view), part = (event.clientX - mini.getBoundingClientRect().left) / g.plot;
    view.goTo(part * view.data.numTokens - (g.last - g.first) / 2, view.cell);
  };
  on(mini, "pointerdown", (event) => { mini.setPointerCapture?.(event.pointerId); jump(event); });
  on(mini, "pointermove", (event) => event.buttons && jump(event));
}

function buildExplore(model, el, guard) {
  const data = readExplore(model), view = exploreView(model, data, guard);
  const silent = make("div", { class: "lw-silent", role: "status" });
  const live = make("div", { class: "lw-sr", "aria-live": "polite", role: "status" });
  let saying = 0;
  // a held key is not read out at every step
  view.announce = (text) => { clearTimeout(saying); saying = setTimeout(() => { live.textContent = text; }, 150); };
  view.sayProblem = () => { silent.textContent = model.get("problem") ?? ""; };
  view.sayProblem();
  if (data.live) view.questions = questions(model, () => model.get("labels").serial, (isSilent) => { if (isSilent) silent.textContent = SILENT; else view.sayProblem(); });
  view.ask = view.questions?.ask;
  const box = exploreBox(view), scale = exploreScale(view), controls = make("div", { class: "lw-controls" });
  view.renewControls = () => keepingFocus(controls, () => controls.replaceChildren(...exploreControls(view)));
  view.renewControls();
  scale.querySelector(".lw-help p").id = view.help;
  const side = make("div", { class: "lw-side" }, exploreReadout(view), selectionPanel(view), adapterPanel(view));
  const root = make("div", { class: "lw lw-explore" }, header(data), make("div", { class: "lw-maps" }, controls, silent, box, scale), side, exploreText(view), live);
  root.lwView = view;
  el.replaceChildren(root);
  view.stopTheme = followTheme(model, root, (theme) => guard(() => {
    Object.assign(view, { theme, tables: pixelTables(data, theme) });
    const brush = view.canvas.getContext("2d");
    view.hatches = { missing: hatch(brush, theme.missing), reused: hatch(brush, theme.muted, true) };
    view.paintScale();
    view.draw();
  }));
  showVisible(view);
  view.drawNow();
  view.writeText();
  view.readSelection();
  view.refresh();
  return view;
}

// Show what the model says is visible, at the next drawing; nothing means all. Of what was set elsewhere nothing is told back.
function showVisible(view) {
  const [first, last] = view.model.get("visible") ?? [];
  view.isLed = last > first;
  view.wanted = view.isLed ? [first, last] : [0, view.data.numTokens];
}

// what Python (or this view) has set
function followSetting(view, name) {
  const { model } = view;
  if (name === "request" || name === "quantity") return view.renewControls();
  if (name === "selection") {
    if (view.selection.join() !== (model.get("selection") ?? []).join()) view.anchor = null;
    return view.select(model.get("selection"));
  }
  if (name === "problem") {
    view.sayProblem();
    // the picker still has the request that could not be shown
    return view.renewControls();
  }
  if (name === "visible") {
    const { first, last } = view.geometry ?? {}, [from, to] = model.get("visible") ?? [];
    // what this view has told itself
    if (Math.abs(first - from) <= 0.02 && Math.abs(last - to) <= 0.02) return;
    showVisible(view);
    return view.draw();
  }
  const [mode, projection, layers] = [model.get("mode") || WHO_LEADS, model.get("projection") ?? "", (model.get("layers") ?? []).join()];
  // what was not set here must show on the controls; what was has the focus there
  const isNews = mode !== view.mode || projection !== view.projection || layers !== view.layers;
  Object.assign(view, { mode, projection, layers });
  if (isNews) view.renewControls();
  view.filter = filterOf(model, view.data);
  view.turn += 1;
  view.tick();
  view.drawNow();
  view.writeText(true);
  view.readSelection();
  view.refresh();
}

function renderExplore({ model, el }) {
  const guard = (call) => { try { return call(); } catch (error) { showError(el, error); } };
  let view = null;
  const sizes = new ResizeObserver(() => view?.draw());
  const leave = () => { sizes.disconnect(); view?.leave(); view = null; };
  const rebuild = () => guard(() => keepingFocus(el, () => { leave(); view = buildExplore(model, el, guard); sizes.observe(view.box); }));
  const listeners = [...IS_LOADED.map((name) => [name, rebuild]), ...SETTINGS.map((name) => [name, () => guard(() => view && followSetting(view, name))])];
  for (const [name, call] of listeners) model.on(`change:${name}`, call);
  rebuild();
  return () => {
    for (const [name, call] of listeners) model.off(`change:${name}`, call);
    leave();
  };
}
