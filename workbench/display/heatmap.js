// View "scalings", second part: everything drawn on the canvas. Values stay codes of one byte, and only the visible
// tokens are drawn, so a long trace costs what fits on the screen.

function colourTable(view) {
  const { codes } = view.data, { theme } = view;
  const stops = theme.scale.map(rgb);
  const table = new Uint8ClampedArray(256 * 4);
  const set = (code, colour, opacity = 255) => table.set([...colour, opacity], code * 4);
  for (let code = 0; code <= codes.steps; code++) {
    const at = (code / codes.steps) * (stops.length - 1), stop = Math.min(Math.floor(at), stops.length - 2);
    set(code, blend(stops[stop], stops[stop + 1], at - stop));
  }
  set(codes.below, rgb(theme.below));
  set(codes.above, rgb(theme.above));
  set(codes.missing, [0, 0, 0], 0);
  return table;
}

// one pixel per token and row, for the visible tokens only; NaN stays transparent over the hatch
function cellImage(width, height, pixel) {
  const image = new ImageData(width, height);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) pixel(image.data, (y * width + x) * 4, x, y);
  const canvas = make("canvas", { width, height });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function adapterCells(view, first, last) {
  const { data, table } = view, { steps, below, above, missing } = data.codes;
  return cellImage(last - first, data.numAdapters, (out, at, x, y) => {
    const mean = meanAt(data, first + x, y);
    const code = Number.isNaN(mean) ? missing : mean > 1 ? above : mean < 0 ? below : Math.round(mean * steps);
    out.set(table.subarray(code * 4, code * 4 + 4), at);
  });
}

function siteCells(view, first, last, rows) {
  const { data, table, adapter, theme } = view, { steps, above, missing } = data.codes, n = data.numAdapters;
  if (adapter !== LEADER) {
    return cellImage(last - first, rows.length, (out, at, x, y) => {
      const code = data.values[((first + x) * data.numRows + rows[y]) * n + adapter];
      for (let i = 0; i < 4; i++) out[at + i] = table[code * 4 + i];
    });
  }
  const page = rgb(theme.page), colours = data.colours.map(rgb);
  return cellImage(last - first, rows.length, (out, at, x, y) => {
    const [leader, value] = leaderAt(data, first + x, rows[y]);
    if (leader < 0) return;
    for (let i = 0; i < 3; i++) out[at + i] = page[i] + (colours[leader][i] - page[i]) * (0.06 + 0.94 * value);
    out[at + 3] = 255;
  });
}

// [adapter, scaling from 0 to 1] of the one with the largest scaling at a cell; -1 where there is none
function leaderAt(data, token, row) {
  const cell = token * data.numRows + row, leader = data.leaders[cell];
  if (leader === 65535) return [-1, 0];
  const code = data.values[cell * data.numAdapters + leader], { steps, above } = data.codes;
  return [leader, code <= steps ? code / steps : code === above ? 1 : 0];
}

function geometry(view) {
  const { data, scroller } = view;
  const width = scroller.clientWidth, gutter = width < 560 ? 78 : 112, plot = width - gutter;
  const fit = clamp(plot / data.numTokens, plot / 16000, 40), widest = Math.max(fit, 28);
  view.zoom ??= fit < 3 ? Math.log(5 / fit) / Math.log(widest / fit) : 0;
  const cell = fit * (widest / fit) ** view.zoom, labelled = cell >= 10;
  const kind = view.site_group;
  const rows = [...Array(data.numRows).keys()].filter((row) => !kind || data.rows.kinds[row] === kind);
  const rowA = clamp(Math.floor(320 / data.numAdapters), 5, 20), rowB = clamp(Math.floor(560 / rows.length), 2, 16);
  const lead = labelled ? 82 : 18, top = lead + 26, sites = top + rowA * data.numAdapters + 28;
  return { width, gutter, cell, labelled, rows, rowA, rowB, lead, top, sites, bottom: sites + rowB * rows.length,
    height: sites + rowB * rows.length + 18, shift: scroller.scrollLeft };
}

function draw(view) {
  const { data, canvas, spacer, theme } = view;
  if (!view.scroller.clientWidth) return;
  view.spacer.style.width = `${geometry(view).gutter + geometry(view).cell * data.numTokens}px`;
  const g = (view.geometry = geometry(view)), ratio = devicePixelRatio || 1;
  spacer.style.height = `${g.height}px`;
  canvas.width = Math.round(g.width * ratio);
  canvas.height = Math.round(g.height * ratio);
  Object.assign(canvas.style, { width: `${g.width}px`, height: `${g.height}px` });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.fillStyle = theme.page;
  context.fillRect(0, 0, g.width, g.height);
  const first = Math.max(0, Math.floor(g.shift / g.cell));
  const last = Math.min(data.numTokens, Math.ceil((g.shift + g.width - g.gutter) / g.cell));
  drawGutter(view, g, context);
  context.save();
  context.beginPath();
  context.rect(g.gutter, 0, g.width - g.gutter, g.height);
  context.clip();
  context.translate(g.gutter - g.shift, 0);
  drawPanels(view, g, context, first, last);
  drawStrips(view, g, context, first, last);
  drawCursor(view, g, context);
  context.restore();
}

function drawGutter(view, g, context) {
  const { data, theme } = view, right = g.gutter - 6;
  const style = { textAlign: "right", fillStyle: theme.muted };
  write(context, "leads", right, g.lead + 6, style);
  write(context, "source", right, g.lead + 19, style);
  if (g.rowA >= 10) data.adapters.forEach((name, i) => {
    const y = g.top + (i + 0.5) * g.rowA;
    context.fillStyle = data.colours[i];
    context.fillRect(2, y - 5, 10, 10);
    write(context, data.keys[i], 16, y, { fillStyle: theme.ink, font: "bold 11px system-ui, sans-serif" });
    write(context, fitted(context, name, right - 30), 30, y, { fillStyle: theme.ink });
  });
  const where = view.site_group ? `at every ${view.site_group}` : "at every site";
  const what = view.adapter === LEADER ? `Who leads, ${where} (stronger = larger scaling)` : `${data.adapters[view.adapter]}, ${where}`;
  write(context, fitted(context, what, g.width - 20), 4, g.sites - 13, { fillStyle: theme.ink, font: "bold 12px system-ui, sans-serif" });
  write(context, "layer", 2, g.sites + 6, { fillStyle: theme.muted });
  const layers = g.rows.map((row) => data.rows.layers[row]);
  let free = -Infinity;
  layers.forEach((layer, i) => {
    if (i && layer === layers[i - 1]) return;
    const y = g.sites + i * g.rowB;
    context.fillStyle = theme.line;
    context.fillRect(g.gutter - 5, y, 4, 1);
    if (y < free) return;
    write(context, layer ?? data.rows.kinds[g.rows[i]], right - 2, y + Math.max(6, g.rowB / 2), style);
    free = y + 13;
  });
}

function drawPanels(view, g, context, first, last) {
  const { data, theme } = view, x = first * g.cell, width = (last - first) * g.cell;
  context.fillStyle = hatch(context, theme.missing);
  context.fillRect(x, g.top, width, g.rowA * data.numAdapters);
  context.fillRect(x, g.sites, width, g.bottom - g.sites);
  const key = [first, last, view.adapter, view.site_group, theme.page].join();
  if (view.cells?.key !== key) view.cells = { key, a: adapterCells(view, first, last), b: siteCells(view, first, last, g.rows) };
  context.imageSmoothingEnabled = g.cell < 1;
  context.drawImage(view.cells.a, x, g.top, width, g.rowA * data.numAdapters);
  context.drawImage(view.cells.b, x, g.sites, width, g.bottom - g.sites);
  for (let token = first; token < last && g.cell >= 5; token++) for (let i = 0; i < data.numAdapters; i++) {
    const mean = meanAt(data, token, i), mark = mean > 1 ? "▲" : mean < 0 ? "▼" : "";
    if (mark) write(context, mark, (token + 0.5) * g.cell, g.top + (i + 0.5) * g.rowA, { textAlign: "center", fillStyle: theme.page, font: "8px sans-serif" });
  }
  context.strokeStyle = theme.line;
  context.strokeRect(-0.5, g.top - 0.5, data.numTokens * g.cell + 1, g.rowA * data.numAdapters + 1);
  context.strokeRect(-0.5, g.sites - 0.5, data.numTokens * g.cell + 1, g.bottom - g.sites + 1);
}

function drawStrips(view, g, context, first, last) {
  const { data, theme } = view, reused = hatch(context, theme.muted, true);
  for (let token = first; token < last; token++) {
    const x = token * g.cell, leader = data.leading[token];
    if (leader >= 0) {
      context.fillStyle = data.colours[leader];
      context.fillRect(x, g.lead, g.cell + 0.5, 12);
    }
    const source = data.source[token];
    context.fillStyle = source === data.positions[token] ? theme.muted : source < 0 ? theme.page : reused;
    context.fillRect(x, g.lead + 15, g.cell + 0.5, 7);
    if (g.labelled) {
      context.save();
      context.translate(x + g.cell / 2, g.lead - 4);
      context.rotate(-Math.PI / 2);
      write(context, data.labels[token], 0, 0, { fillStyle: theme.ink, font: "10px ui-monospace, monospace" });
      context.restore();
    }
  }
  drawKeys(view, g, context, first, last);
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].find((one) => one * g.cell >= 46) ?? 20000;
  for (let token = Math.ceil(first / step) * step; token < last; token += step) {
    write(context, String(data.positions[token]), (token + 0.5) * g.cell, g.bottom + 10, { textAlign: "center", fillStyle: theme.muted });
  }
  const at = data.promptTokens * g.cell;
  if (data.promptTokens > 0) write(context, "prompt", at - 6, 8, { textAlign: "right", fillStyle: theme.ink });
  if (data.promptTokens < data.numTokens) write(context, "generated", at + 6, 8, { fillStyle: theme.ink });
  context.fillStyle = theme.ink;
  if (data.promptTokens > 0 && data.promptTokens < data.numTokens) {
    context.fillRect(at - 1, 2, 2, g.top + g.rowA * data.numAdapters - 2);
    context.fillRect(at - 1, g.sites, 2, g.bottom - g.sites);
  }
}

// the letter of the leading adapter, in the middle of each run that has room for it
function drawKeys(view, g, context, first, last) {
  const { data } = view;
  for (let start = first, stop; start < last; start = stop) {
    const leader = data.leading[start];
    for (stop = start + 1; stop < last && data.leading[stop] === leader; stop++);
    if (leader < 0 || (stop - start) * g.cell < 7 * data.keys[leader].length + 2) continue;
    const [red, green, blue] = rgb(data.colours[leader]);
    write(context, data.keys[leader], ((start + stop) / 2) * g.cell, g.lead + 6.5, { textAlign: "center",
      fillStyle: 0.3 * red + 0.6 * green + 0.1 * blue > 120 ? "#000" : "#fff", font: "bold 10px system-ui, sans-serif" });
  }
}

function drawCursor(view, g, context) {
  const { token, row } = view.current();
  Object.assign(context, { strokeStyle: view.theme.focus, lineWidth: 2 });
  const x = token * g.cell - 1, width = Math.max(g.cell, 2) + 2, end = g.top + g.rowA * view.data.numAdapters;
  context.strokeRect(x, g.lead - 2, width, end - g.lead + 4);
  context.strokeRect(x, g.sites - 1, width, g.bottom - g.sites + 2);
  const at = g.rows.indexOf(row);
  const across = Math.min(g.width - g.gutter, view.data.numTokens * g.cell - g.shift);
  if (at >= 0) context.strokeRect(g.shift + 1, g.sites + at * g.rowB - 1, across - 2, g.rowB + 2);
}
