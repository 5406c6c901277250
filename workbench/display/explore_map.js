// View "explore", second part: the map. One image of one pixel per cell is made of the visible columns only, from a slab
// whose columns are about a pixel wide, and is scaled to its place: a frame costs what fits on the screen.

const MAX_CELL = 40, MAX_PANELS = 16;
const STEPS_OF_AXIS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000];
const EVERY = "every adapter";

// 256 colours of the scale, and for each adapter 256 from the page to its own colour, as 32-bit pixels
function pixelTables(data, theme) {
  const { steps, below, above, missing } = data.codes, stops = theme.scale.map(rgb), page = rgb(theme.page);
  const pixel = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  const table = (colourOf) => {
    const out = new Uint32Array(256);
    for (let code = 0; code <= steps; code++) out[code] = pixel(colourOf(code / steps));
    out[below] = out[0];
    out[above] = out[steps];
    out[missing] = 0;
    return out;
  };
  const scale = table((part) => {
    const at = part * (stops.length - 1), stop = Math.min(Math.floor(at), stops.length - 2);
    return blend(stops[stop], stops[stop + 1], at - stop);
  });
  [scale[below], scale[above]] = [pixel(rgb(theme.below)), pixel(rgb(theme.above))];
  return { scale, adapters: data.colours.map((colour) => table((part) => blend(page, rgb(colour), 0.06 + 0.94 * part))) };
}

// the tokens asked for: those of the next frame, while `view.geometry` is what the last one drew
function aimed(view) {
  const { data } = view, width = view.box.clientWidth, gutter = width < 560 ? 84 : 124, plot = Math.max(40, width - gutter - 1);
  const fit = Math.min(plot / data.numTokens, MAX_CELL);
  if (view.wanted && width) {
    const [first, last] = view.wanted;
    Object.assign(view, { first, cell: plot / (last - first), wanted: null });
  }
  view.cell = clamp(view.cell ?? fit, fit, Math.max(fit, MAX_CELL));
  view.first = clamp(view.first ?? 0, 0, Math.max(0, data.numTokens - plot / view.cell));
  const { cell, first } = view;
  return { width, gutter, plot, fit, cell, first, last: Math.min(data.numTokens, first + plot / cell) };
}

function exploreGeometry(view) {
  const { filter, mode } = view, aim = aimed(view), { gutter, cell, first } = aim, labelled = cell >= 10, lead = labelled ? 92 : 20, means = lead + 26;
  const rowA = clamp(Math.floor(300 / filter.adapters.length), 2, 18), map = means + rowA * filter.adapters.length + 30;
  const g = { ...aim, labelled, lead, means, rowA, map };
  if (mode === EVERY) {
    g.panels = panelsOf(view);
    g.rowB = clamp(Math.floor(96 / filter.layers.length), 1, 10);
    g.panel = Math.max(g.rowB * filter.layers.length, 14) + 6;
    g.bottom = map + g.panel * g.panels.length - 6;
  } else {
    const rows = filter.sites.length;
    g.rowB = rows <= 260 ? clamp(Math.floor(520 / rows), 2, 16) : 520 / rows;
    g.bottom = map + g.rowB * rows;
  }
  return Object.assign(g, { height: Math.ceil(g.bottom) + 20, x: (token) => gutter + (token - first) * cell });
}

// the places, in the filter, of the adapters that get a panel: all, or those with the largest shares
function panelsOf({ data, filter }) {
  const order = filter.adapters.map((_, k) => k), share = (k) => data.shares.all[filter.adapters[k]] ?? 0;
  return order.sort((a, b) => share(b) - share(a)).slice(0, MAX_PANELS).sort((a, b) => a - b);
}

// the slab to draw from: windows over the overview, each with columns of about a pixel
function slabsFor(view, g) {
  const { data } = view, wanted = 0.75 / (devicePixelRatio || 1);
  const touching = data.windows.filter((slab) => slab.start < g.last && slab.stop > g.first);
  const covers = touching.some((slab) => slab.start <= g.first && slab.stop >= g.last && slab.rows === data.numSites);
  return [...(covers ? [] : [data.overview]), ...touching.sort((a, b) => (finer(a, b) ? 1 : -1))].map((slab) => {
    let one = slab;
    while (one.block * g.cell < wanted && one.columns > 1) one = coarser(data, one);
    return one;
  });
}

// [first, last) columns of a slab that are visible
const columnsOf = (slab, g) => [Math.max(0, Math.floor((g.first - slab.start) / slab.block)),
  Math.min(slab.columns, Math.ceil((g.last - slab.start) / slab.block))];

// Draw columns [from, to) of a slab as an image of `rows` lines; fill(out, line, from, to) writes one line of pixels.
function stamp(view, g, slab, [from, to], rows, y, height, fill) {
  if (to <= from || !rows) return;
  const { scratch, context } = view, width = to - from, image = new ImageData(width, rows), pixels = new Uint32Array(image.data.buffer);
  for (let line = 0; line < rows; line++) fill(pixels.subarray(line * width, (line + 1) * width), line, from, to);
  if (scratch.width < width || scratch.height < rows) Object.assign(scratch, { width: Math.max(scratch.width, width), height: Math.max(scratch.height, rows) });
  scratch.getContext("2d").putImageData(image, 0, 0);
  const cell = slab.block * g.cell;
  context.imageSmoothingEnabled = cell < 1 || height < rows;
  context.drawImage(scratch, 0, 0, width, rows, g.x(slab.start + from * slab.block), y, width * cell, height);
}

function drawMeans(view, g, slab, range) {
  const { data, filter, tables } = view, { steps, missing, above } = data.codes, means = meansOf(data, slab, filter);
  stamp(view, g, slab, range, filter.adapters.length, g.means, g.rowA * filter.adapters.length, (out, k, from, to) => {
    for (let c = from; c < to; c++) {
      const code = codeOfValue(data, means[k * slab.columns + c], steps, missing, above);
      out[c - from] = tables.scale[code];
    }
  });
}

function codeOfValue({ scale }, value, steps, missing, above) {
  if (value !== value) return missing;
  const part = partOfScale({ scale }, value);
  return part > 1.0001 ? above : Math.round(clamp(part, 0, 1) * steps);
}

function drawCells(view, g, slab, range) {
  const { data, filter, mode, tables } = view, { columns, rows, codes, rowOf } = slab, height = g.rowB * filter.sites.length;
  if (mode === EVERY) return drawPanelCells(view, g, slab, range);
  const adapter = data.names.indexOf(mode);
  if (adapter >= 0) {
    return stamp(view, g, slab, range, filter.sites.length, g.map, height, (out, line, from, to) => {
      const at = (adapter * rows + rowOf[filter.sites[line]]) * columns;
      for (let c = from; c < to; c++) out[c - from] = tables.scale[codes[at + c]];
    });
  }
  const leaders = shownLeaders(data, slab, filter), size = rows * columns;
  stamp(view, g, slab, range, filter.sites.length, g.map, height, (out, line, from, to) => {
    const at = rowOf[filter.sites[line]] * columns;
    for (let c = from; c < to; c++) {
      const leader = leaders[at + c];
      out[c - from] = leader < data.numAdapters ? tables.adapters[leader][codes[leader * size + at + c]] : 0;
    }
  });
}

// every adapter: a panel each, its rows the means over the shown sites of a layer
function drawPanelCells(view, g, slab, range) {
  const { data, filter, tables } = view;
  g.panels.forEach((k, panel) => {
    const lines = kept(slab, `layers ${filter.key} ${filter.adapters[k]}`, () => layerCodes(data, slab, filter.layers, filter.adapters[k]));
    stamp(view, g, slab, range, lines.length, g.map + panel * g.panel, g.rowB * lines.length, (out, line, from, to) => {
      for (let c = from; c < to; c++) out[c - from] = tables.scale[lines[line][c]];
    });
  });
}

// codes of the means over the shown sites of each layer, [layer][column]
function layerCodes(data, slab, layers, adapter) {
  const { steps, missing, above } = data.codes, { columns, rows, codes, rowOf } = slab, sums = new Float32Array(columns), counts = new Uint16Array(columns);
  return layers.map(({ sites }) => {
    sums.fill(0);
    counts.fill(0);
    for (const site of sites) {
      const at = (adapter * rows + rowOf[site]) * columns;
      for (let c = 0; c < columns; c++) {
        const value = data.values[codes[at + c]];
        if (value === value) { sums[c] += value; counts[c] += 1; }
      }
    }
    return Uint8Array.from(sums, (sum, c) => codeOfValue(data, sum / counts[c], steps, missing, above));
  });
}

const layerFilter = ({ sites }, adapter) => ({ sites, adapters: [adapter], key: `${sites} ${adapter}` });

function sizeCanvas(canvas, width, height) {
  const ratio = devicePixelRatio || 1, [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    Object.assign(canvas, { width: w, height: h });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

// whether there was room to draw in
function drawExplore(view) {
  if (!view.box.clientWidth) return false;
  const g = (view.geometry = exploreGeometry(view)), { theme } = view, context = (view.context = sizeCanvas(view.canvas, g.width, g.height));
  view.stack.style.height = `${g.height}px`;
  context.fillStyle = theme.page;
  context.fillRect(0, 0, g.width, g.height);
  drawExploreGutter(view, g, context);
  context.save();
  context.beginPath();
  context.rect(g.gutter, 0, Math.min(g.plot, (view.data.numTokens - g.first) * g.cell), g.height);
  context.clip();
  context.fillStyle = view.hatches.missing;
  context.fillRect(g.gutter, g.means, g.plot, g.rowA * view.filter.adapters.length);
  if (view.mode !== EVERY) context.fillRect(g.gutter, g.map, g.plot, g.bottom - g.map);
  for (const slab of slabsFor(view, g)) {
    const range = columnsOf(slab, g);
    drawMeans(view, g, slab, range);
    drawCells(view, g, slab, range);
    drawLeads(view, g, slab, range);
  }
  drawTokens(view, g, context);
  context.restore();
  drawOverlay(view);
  drawMinimap(view);
  return true;
}

function drawExploreGutter(view, g, context) {
  const { data, filter, theme, mode } = view, right = g.gutter - 6, muted = { textAlign: "right", fillStyle: theme.muted };
  const name = (adapter, y) => {
    context.fillStyle = data.colours[adapter];
    context.fillRect(2, y - 5, 10, 10);
    write(context, data.keys[adapter], 16, y, { fillStyle: theme.ink, font: "bold 11px system-ui, sans-serif" });
    const at = 20 + 8 * data.keys[adapter].length;
    write(context, fitted(context, data.adapters[adapter], right - at), at, y, { fillStyle: theme.ink });
  };
  write(context, "leads", right, g.lead + 6, muted);
  write(context, "source", right, g.lead + 19, muted);
  if (g.rowA >= 10) filter.adapters.forEach((adapter, k) => name(adapter, g.means + (k + 0.5) * g.rowA));
  else write(context, `${filter.adapters.length} adapters`, right, g.means + 8, muted);
  write(context, fitted(context, view.heading(), 0.86 * (g.width - 20)), 4, g.map - 14, { fillStyle: theme.ink, font: "bold 12px system-ui, sans-serif" });
  if (mode === EVERY) return g.panels.forEach((k, panel) => name(filter.adapters[k], g.map + panel * g.panel + Math.max(7, g.panel / 2 - 3)));
  write(context, "layer", 2, g.map + 6, { fillStyle: theme.muted });
  let free = -Infinity;
  filter.sites.forEach((site, i) => {
    const layer = data.rows.layers[site], y = g.map + i * g.rowB;
    if (i && layer === data.rows.layers[filter.sites[i - 1]]) return;
    if (y < free) return;
    context.fillStyle = theme.line;
    context.fillRect(g.gutter - 5, y, 4, 1);
    write(context, layer ?? fitted(context, data.rows.kinds[site], right - 30), right - 2, y + Math.max(6, g.rowB / 2), muted);
    free = y + 13;
  });
}

function drawLeads(view, g, slab, [from, to]) {
  const { data, filter, context } = view, { leaders } = leadsOf(data, slab, filter);
  for (let start = from, stop; start < to; start = stop) {
    const leader = leaders[start];
    for (stop = start + 1; stop < to && leaders[stop] === leader; stop++);
    const x = g.x(slab.start + start * slab.block), width = (stop - start) * slab.block * g.cell;
    context.fillStyle = leader < 0 ? view.theme.page : data.colours[leader];
    context.fillRect(x, g.lead, width + 0.3, 12);
    if (leader < 0 || width < 7 * data.keys[leader].length + 2) continue;
    const [red, green, blue] = rgb(data.colours[leader]), left = Math.max(x, g.gutter), right = Math.min(x + width, g.gutter + g.plot);
    write(context, data.keys[leader], (left + right) / 2, g.lead + 6.5, { textAlign: "center",
      fillStyle: 0.3 * red + 0.6 * green + 0.1 * blue > 120 ? "#000" : "#fff", font: "bold 10px system-ui, sans-serif" });
  }
}

// what is known of each token, whatever the slab: source, text, position, and where a part begins
function drawTokens(view, g, context) {
  const { data, theme, hatches } = view, from = Math.floor(g.first), to = Math.ceil(g.last);
  for (const [start, stop, kind] of data.sources) {
    if (stop <= from || start >= to) continue;
    context.fillStyle = [theme.page, theme.muted, hatches.reused][kind];
    context.fillRect(g.x(Math.max(start, from)), g.lead + 15, (Math.min(stop, to) - Math.max(start, from)) * g.cell, 7);
  }
  for (let token = from; token < to && g.labelled; token++) {
    context.save();
    context.translate(g.x(token + 0.5), g.lead - 4);
    context.rotate(-Math.PI / 2);
    write(context, onOneLine(data.tokens[token], 10), 0, 0, { fillStyle: theme.ink, font: "10px ui-monospace, monospace" });
    context.restore();
  }
  const step = STEPS_OF_AXIS.find((one) => one * g.cell >= 46) ?? 100000;
  for (let token = Math.ceil(from / step) * step; token < to; token += step) {
    const text = String(data.positions[token]), x = clamp(g.x(token + 0.5), g.gutter + 3 * text.length, g.gutter + g.plot - 4 * text.length);
    write(context, text, x, g.bottom + 11, { textAlign: "center", fillStyle: theme.muted });
  }
  context.strokeStyle = theme.line;
  context.lineWidth = 1;
  data.parts.forEach(([start, generated], i) => {
    const x = g.x(start), stop = data.parts[i + 1]?.[0] ?? data.numTokens;
    if (stop < from || start > to) return;
    const word = generated ? "generated" : "prompt", room = Math.min(g.x(stop), g.gutter + g.plot) - Math.max(x, g.gutter);
    if (room > 62) write(context, word, Math.max(x, g.gutter) + 5, 8, { fillStyle: theme.ink });
    if (!start) return;
    context.fillStyle = theme.ink;
    context.fillRect(x - 1, 2, 2, g.means + g.rowA * view.filter.adapters.length - 2);
    context.fillRect(x - 1, g.map, 2, g.bottom - g.map);
  });
}

// newlines, tabs and spaces that can be seen, on one line (labels.short says the same in Python)
function onOneLine(text, limit) {
  const line = text.replaceAll("\n", "").replaceAll("\t", "").replaceAll(" ", "·"), chars = [...line];
  return chars.length <= limit ? line : `${chars.slice(0, limit - 1).join("")}…`;
}

// selection, pointed-at cell and cursor, on a canvas of their own: pointing redraws no cell
function drawOverlay(view) {
  const { geometry: g, theme, filter } = view;
  if (!g) return;
  const context = sizeCanvas(view.over, g.width, g.height);
  context.clearRect(0, 0, g.width, g.height);
  context.save();
  context.beginPath();
  context.rect(g.gutter - 1, 0, g.plot + 2, g.height);
  context.clip();
  if (view.selection.length) {
    const [start, stop] = view.selection, x = g.x(start), width = (stop - start) * g.cell, end = g.means + g.rowA * filter.adapters.length;
    context.fillStyle = theme.focus;
    context.globalAlpha = 0.07;
    context.fillRect(x, g.lead - 3, width, end - g.lead + 3);
    context.fillRect(x, g.map, width, g.bottom - g.map);
    context.globalAlpha = 1;
    for (const edge of [x - 1, x + width - 1]) {
      context.fillRect(edge, g.lead - 3, 2, end - g.lead + 3);
      context.fillRect(edge, g.map, 2, g.bottom - g.map);
    }
    context.fillRect(x, g.lead - 5, width, 3);
  }
  const { token, site } = view.current();
  Object.assign(context, { strokeStyle: theme.focus, lineWidth: 2 });
  const x = g.x(token) - 1, width = Math.max(g.cell, 2) + 2;
  context.strokeRect(x, g.lead - 2, width, g.means + g.rowA * filter.adapters.length - g.lead + 4);
  context.strokeRect(x, g.map - 1, width, g.bottom - g.map + 2);
  const line = view.mode === EVERY ? -1 : filter.sites.indexOf(site);
  if (line >= 0) context.strokeRect(g.gutter + 1, g.map + line * g.rowB - 1, Math.min(g.plot, (view.data.numTokens - g.first) * g.cell) - 2, g.rowB + 2);
  context.restore();
}

// the whole trace on one line: who leads, what is visible, what is selected
function drawMinimap(view) {
  const { data, filter, geometry: g, theme, selection } = view, height = 22, context = sizeCanvas(view.mini, g.plot, height);
  const scale = g.plot / data.numTokens, { leaders } = leadsOf(data, data.overview, filter), { block } = data.overview;
  const { columns } = data.overview;
  context.fillStyle = theme.card;
  context.fillRect(0, 0, g.plot, height);
  // one line of pixels per screen column: runs would be thousands where the lead changes at every token
  for (let x = 0; x < g.plot; x++) {
    const leader = leaders[Math.min(columns - 1, Math.floor(x / scale / block))];
    if (leader < 0) continue;
    context.fillStyle = data.colours[leader];
    context.fillRect(x, 5, 1, height - 10);
  }
  context.fillStyle = theme.focus;
  if (selection.length) context.fillRect(selection[0] * scale, 0, Math.max(2, (selection[1] - selection[0]) * scale), 4);
  const [left, right] = [g.first * scale, g.last * scale];
  context.globalAlpha = 0.62;
  context.fillStyle = theme.page;
  context.fillRect(0, 5, left, height - 10);
  context.fillRect(right, 5, g.plot - right, height - 10);
  context.globalAlpha = 1;
  Object.assign(context, { strokeStyle: theme.focus, lineWidth: 2 });
  context.strokeRect(left + 1, 2, Math.max(4, right - left - 2), height - 4);
}
