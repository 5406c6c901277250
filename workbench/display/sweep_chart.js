// Second part of the view of a sweep: one panel of curves as SVG. Every series has a colour, a marker and a dash.

const SWEEP_DASHES = ["", "7 3", "2 2.5", "8 3 2 3", "12 4"];
const SWEEP_MARKS = ["M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0", "M-3.6-3.6h7.2v7.2h-7.2z", "M0-4.6L4.4 3.4H-4.4z", "M0-5L5 0 0 5-5 0z", "M0 4.6L4.4-3.4H-4.4z",
  "M-1.6-4.6h3.2v3h3v3.2h-3v3h-3.2v-3h-3v-3.2h3z", "M-4-2l2-2 2 2 2-2 2 2-2 2 2 2-2 2-2-2-2 2-2-2 2-2z", "M-4.6 0L3.4-4.4V4.4z", "M4.6 0L-3.4-4.4V4.4z",
  "M0-5.2L1.4-1.7 5-1.6 2.2.7 3.1 4.2 0 2.2-3.1 4.2-2.2.7-5-1.6-1.4-1.7z"];

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== undefined && value !== false) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const luminance = (hex) => rgb(hex).map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
  .reduce((sum, channel, i) => sum + [0.2126, 0.7152, 0.0722][i] * channel, 0);

// how a series looks on this page; a colour too near to the page gets an outline
function seriesStyle(data, code, theme) {
  const colour = data.colours[code % data.colours.length];
  const [low, high] = [luminance(colour), luminance(theme.page)].sort((a, b) => a - b);
  return { colour, dash: SWEEP_DASHES[(code + Math.floor(code / SWEEP_MARKS.length)) % SWEEP_DASHES.length], mark: SWEEP_MARKS[code % SWEEP_MARKS.length],
    outline: (high + 0.05) / (low + 0.05) < 3.1 };
}

function seriesPath(d, style, attributes = {}) {
  const line = { d, fill: "none", "stroke-dasharray": style.dash || undefined, ...attributes };
  const parts = style.outline ? [svg("path", { ...line, class: "lw-sweep-outline", "stroke-width": 4 })] : [];
  return [...parts, svg("path", { ...line, stroke: style.colour, "stroke-width": 2 })];
}

function seriesMark(style, x, y) {
  return svg("path", { d: style.mark, transform: `translate(${x.toFixed(2)} ${y.toFixed(2)})`, fill: style.colour,
    class: style.outline ? "lw-sweep-mark lw-sweep-outlined" : "lw-sweep-mark" });
}

function seriesSample(data, code, theme) {
  const style = seriesStyle(data, code, theme);
  return svg("svg", { class: "lw-sweep-sample", viewBox: "0 0 34 14", width: 34, height: 14, "aria-hidden": "true" },
    ...seriesPath("M1 7H33", style), seriesMark(style, 17, 7));
}

function niceTicks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const found = [], decades = high - low;
  const within = decades > 8 ? [1] : decades > 2 ? [1] : decades > 1 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const step = Math.max(1, Math.ceil(decades / 8));
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) if (power % step === 0) {
    for (const factor of within) { const at = Math.log10(factor) + power; if (at >= low - 1e-9 && at <= high + 1e-9) found.push(Number((factor * 10 ** power).toPrecision(6))); }
  }
  return found;
}

// label place -> pixel, ticks, and where the values that are missing stand
function xScale(data, choice, points, width) {
  const column = data.columns[choice.x], codes = [...new Set(points.map((point) => point.x))].sort((a, b) => a - b);
  const places = new Map(), numeric = column.label_values !== null;
  if (!numeric) {
    codes.forEach((code, i) => places.set(code, ((i + 0.5) / codes.length) * width));
    return { places, numeric, slot: null, ticks: codes.map((code) => ({ at: places.get(code), text: column.said[code] })) };
  }
  const valueOf = (code) => { const value = column.label_values[code]; return value === null ? null : choice.log_x ? (value > 0 ? Math.log10(value) : NaN) : value; };
  const values = codes.map(valueOf), held = values.filter((value) => value !== null && Number.isFinite(value));
  const low = Math.min(...held, Infinity), high = Math.max(...held, -Infinity), hasNone = values.includes(null);
  const room = hasNone ? width - 54 : width, pad = 14;
  const scale = (value) => (high > low ? pad + ((value - low) / (high - low)) * (room - 2 * pad) : room / 2);
  codes.forEach((code, i) => { if (values[i] === null) places.set(code, width - 26); else if (Number.isFinite(values[i])) places.set(code, scale(values[i])); });
  const own = held.map((value) => ({ at: scale(value), text: sweepNumber(choice.log_x ? 10 ** value : value) })).sort((a, b) => a.at - b.at);
  const dense = own.length > 12 || own.some((tick, i) => i && tick.at - own[i - 1].at < 9 + 3.2 * (tick.text.length + own[i - 1].text.length));
  const nice = !held.length ? [] : high > low ? (choice.log_x ? logTicks(low, high) : niceTicks(low, high, Math.max(2, room / 70))) : [];
  const ticks = dense && nice.length > 1 ? nice.map((value) => ({ at: scale(choice.log_x ? Math.log10(value) : value), text: sweepNumber(value) })) : own;
  return { places, numeric, slot: hasNone && held.length ? width - 54 : null, ticks: hasNone ? [...ticks, { at: width - 26, text: SWEEP_NONE }] : ticks };
}

function yScale(points, isLog, height) {
  const held = points.flatMap((point) => [point.median, point.low, point.high]).filter((value) => Number.isFinite(value) && (!isLog || value > 0));
  let low = Math.min(...held), high = Math.max(...held);
  if (!held.length) [low, high] = isLog ? [0.1, 1] : [0, 1];
  if (isLog) [low, high] = [Math.log10(low / 1.3), Math.log10(high * 1.3)];
  else {
    const pad = 0.06 * (high - low || Math.abs(high) || 1);
    [low, high] = [low >= 0 && low < 0.5 * high ? 0 : low - pad, high + pad];
  }
  const place = (value) => height - (((isLog ? Math.log10(Math.max(value, 1e-300)) : value) - low) / (high - low)) * height;
  const ticks = isLog ? logTicks(low, high) : niceTicks(low, high, 5);
  return { place, ticks: ticks.map((value) => ({ at: place(value), text: sweepNumber(value) })) };
}

// one panel: its axes, and a focusable mark for every point; `shown` are the series that are drawn
function sweepPanel(view, points, all, width) {
  const { data, choice, theme } = view, height = 250, bottom = 42, top = 8;
  const y = yScale(all, choice.log_y, height);
  const left = 27 + Math.max(...y.ticks.map((tick) => tick.text.length * 6.8), 20), inner = Math.max(width - left - 12, 60);
  const x = xScale(data, choice, all, inner);
  const root = svg("svg", { class: "lw-sweep-chart", width, height: height + top + bottom, role: "group",
    "aria-label": `${data.columns[choice.y].title} by ${data.columns[choice.x].title}: ${points.length} points. Arrow keys move from point to point.` });
  const plot = svg("g", { transform: `translate(${left} ${top})` });
  for (const { at, text } of y.ticks) plot.append(svg("line", { x1: 0, x2: inner, y1: at, y2: at, class: "lw-sweep-grid" }), svg("text", { x: -7, y: at, class: "lw-sweep-tick", "text-anchor": "end", "dominant-baseline": "central" }, text));
  if (x.slot !== null) plot.append(svg("line", { x1: x.slot, x2: x.slot, y1: 0, y2: height, class: "lw-sweep-slot" }));
  let free = -Infinity;
  for (const { at, text } of x.ticks) {
    const said = text.length > 14 ? `${text.slice(0, 13)}…` : text, half = said.length * 3.4;
    plot.append(svg("line", { x1: at, x2: at, y1: height, y2: height + 4, class: "lw-sweep-axis" }));
    if (at - half < free) continue;
    plot.append(svg("text", { x: at, y: height + 16, class: "lw-sweep-tick", "text-anchor": "middle" }, said));
    free = at + half + 4;
  }
  plot.append(svg("line", { x1: 0, x2: inner, y1: height, y2: height, class: "lw-sweep-axis" }), svg("line", { x1: 0, x2: 0, y1: 0, y2: height, class: "lw-sweep-axis" }));
  plot.append(svg("text", { x: inner / 2, y: height + 35, class: "lw-sweep-name", "text-anchor": "middle" }, data.columns[choice.x].axis));
  plot.append(svg("text", { transform: `translate(${9 - left} ${height / 2}) rotate(-90)`, class: "lw-sweep-name", "text-anchor": "middle" }, data.columns[choice.y].axis));
  const series = [...new Set(points.map((point) => point.series))];
  series.forEach((code, place) => plot.append(seriesGroup(view, points.filter((point) => point.series === code), { x, y, place, count: series.length, inner })));
  root.append(plot);
  return root;
}

function seriesGroup(view, points, { x, y, place, count, inner }) {
  const { data, choice, theme } = view, style = seriesStyle(data, points[0].series, theme), group = svg("g");
  const shift = x.numeric ? 0 : (place - (count - 1) / 2) * Math.min(14, (0.7 * inner) / Math.max(1, x.places.size) / count);
  const placed = points.filter((point) => point.n && x.places.has(point.x) && (!choice.log_y || point.median > 0))
    .map((point) => ({ point, px: x.places.get(point.x) + shift, py: y.place(point.median) }));
  const isLoose = ({ point }) => !x.numeric || data.columns[choice.x].label_values[point.x] === null;
  const joined = placed.filter((one) => !isLoose(one));
  if (joined.length > 1) group.append(...seriesPath(joined.map(({ px, py }, i) => `${i ? "L" : "M"}${px.toFixed(2)} ${py.toFixed(2)}`).join(""), style));
  for (const { point, px, py } of placed) {
    const mark = svg("g", { class: "lw-sweep-point", role: "img", tabindex: "-1", "aria-label": sweepSaid(data, choice, point), "data-point": view.points.indexOf(point) });
    if (Number.isFinite(point.low)) {
      const low = y.place(choice.log_y ? Math.max(point.low, 10 ** -300) : point.low), high = y.place(point.high);
      const ends = `M${(px - 4).toFixed(2)} ${high.toFixed(2)}h8m-4 0V${Math.min(low, 250).toFixed(2)}m-4 0h8`;
      mark.append(...(style.outline ? [svg("path", { d: ends, class: "lw-sweep-outline", fill: "none", "stroke-width": 3 })] : []),
        svg("path", { d: ends, class: "lw-sweep-bar", stroke: style.colour, fill: "none", "stroke-width": 1.4 }));
    }
    mark.append(seriesMark(style, px, py), svg("circle", { cx: px, cy: py, r: 10, class: "lw-sweep-hit" }));
    group.append(mark);
  }
  return group;
}
