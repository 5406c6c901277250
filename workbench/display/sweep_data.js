// First part of the view of a sweep: the table, grouped into points with means and intervals. Means are resampled as
// `bootstrap.py` does it, with the same generator, so that the page and Python say the same.

const SWEEP_NONE = "none", SWEEP_RESAMPLES = 2000, SWEEP_SEED = 1, SWEEP_MOST_RESAMPLED = 64, SWEEP_Z = 1.959963984540054;

function sweepData(model) {
  const bytes = (name) => { const view = bytesOf(model, name); return view.buffer; };
  const codes = new Int32Array(bytes("codes")), numbers = new Float64Array(bytes("numbers")), rows = model.get("num_rows");
  const columns = {};
  for (const entry of model.get("columns")) {
    columns[entry.name] = { ...entry,
      codes: entry.codes_at == null ? null : codes.subarray(entry.codes_at * rows, (entry.codes_at + 1) * rows),
      numbers: entry.numbers_at == null ? null : numbers.subarray(entry.numbers_at * rows, (entry.numbers_at + 1) * rows) };
  }
  return { columns, rows, notes: model.get("notes"), colours: model.get("colours") };
}

// columns that can split, those that were made to first; and columns that can be drawn
function sweepSplits(data, most = Infinity) {
  const able = Object.values(data.columns).filter((column) => column.labels && column.labels.length > 1 && column.labels.length <= most);
  return [...able.filter((one) => one.is_axis && !one.is_repeat), ...able.filter((one) => one.is_repeat), ...able.filter((one) => !one.is_axis)];
}

function sweepMeasures(data) {
  const able = Object.values(data.columns).filter((column) => column.numbers);
  return [...able.filter((one) => one.is_metric), ...able.filter((one) => !one.is_metric)];
}

function sweepKept(data, filters) {
  const tests = Object.entries(filters ?? {}).map(([name, labels]) => {
    const { codes, labels: known } = data.columns[name], allowed = new Set(labels.map((label) => known.indexOf(label)));
    return (row) => allowed.has(codes[row]);
  });
  const kept = [];
  for (let row = 0; row < data.rows; row++) if (tests.every((test) => test(row))) kept.push(row);
  return kept;
}

// one entry per drawn point, sorted by panel, series and x; x, series and facet are places among the labels
function sweepPoints(data, choice, kept) {
  const { x, series, facet } = choice, values = data.columns[choice.y].numbers;
  const codeOf = (name, row) => (name ? data.columns[name].codes[row] : 0);
  const groups = new Map();
  for (const row of kept) {
    const place = [codeOf(facet, row), codeOf(series, row), codeOf(x, row)], key = place.join();
    if (!groups.has(key)) groups.set(key, { facet: place[0], series: place[1], x: place[2], values: [], lost: 0 });
    const group = groups.get(key);
    if (Number.isFinite(values[row])) group.values.push(values[row]);
    else group.lost++;
  }
  return [...groups.values()].sort((a, b) => a.facet - b.facet || a.series - b.series || a.x - b.x)
    .map((group) => ({ ...group, ...sweepMean(group.values) }));
}

const sweepIndices = new Map();

function sweepResamples(count) {
  if (!sweepIndices.has(count)) {
    let state = SWEEP_SEED;
    const found = new Int32Array(SWEEP_RESAMPLES * count);
    for (let i = 0; i < found.length; i++) {
      state = (state + 0x6d2b79f5) | 0;
      let mixed = Math.imul(state ^ (state >>> 15), state | 1);
      mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
      found[i] = Math.floor((((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296) * count);
    }
    sweepIndices.set(count, found);
  }
  return sweepIndices.get(count);
}

function sweepMean(values) {
  const n = values.length, mean = values.reduce((sum, value) => sum + value, 0) / n;
  if (n < 2) return { mean: n ? mean : NaN, low: NaN, high: NaN, n };
  if (n > SWEEP_MOST_RESAMPLED) {
    const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1));
    const half = (SWEEP_Z * spread) / Math.sqrt(n);
    return { mean, low: mean - half, high: mean + half, n };
  }
  const indices = sweepResamples(n), means = new Float64Array(SWEEP_RESAMPLES);
  for (let i = 0, at = 0; i < SWEEP_RESAMPLES; i++) {
    let sum = 0;
    for (let j = 0; j < n; j++) sum += values[indices[at++]];
    means[i] = sum / n;
  }
  means.sort();
  const at = (part) => { const place = part * (SWEEP_RESAMPLES - 1), low = Math.floor(place); return means[low] + (place - low) * (means[Math.min(low + 1, SWEEP_RESAMPLES - 1)] - means[low]); };
  return { mean, low: at(0.025), high: at(0.975), n };
}

// axes that vary among the rows of one point: its mean is over them, too
function sweepAveraged(data, choice, kept) {
  const split = [choice.x, choice.series, choice.facet].filter((name) => name && data.columns[name].codes);
  const found = [];
  for (const column of Object.values(data.columns)) {
    if (!column.is_axis || column.is_repeat || !column.codes || split.includes(column.name)) continue;
    const seen = new Map();
    for (const row of kept) {
      const key = split.map((name) => data.columns[name].codes[row]).join();
      if (!seen.has(key)) seen.set(key, new Set());
      seen.get(key).add(column.codes[row]);
    }
    const most = Math.max(0, ...[...seen.values()].map((labels) => labels.size));
    if (most > 1) found.push(`${column.title} (${most} values)`);
  }
  return found;
}

function sweepNumber(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e7)) return value.toExponential(3).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

function sweepSaid(data, choice, point) {
  const where = [["facet", point.facet], ["series", point.series], ["x", point.x]].filter(([part]) => choice[part])
    .map(([part, code]) => `${data.columns[choice[part]].title} ${data.columns[choice[part]].said[code]}`).join(", ");
  const repeats = point.n === 1 ? "n = 1, no interval" : `95 % interval ${sweepNumber(point.low)} to ${sweepNumber(point.high)}, n = ${point.n}`;
  return `${where}: ${data.columns[choice.y].title} ${sweepNumber(point.mean)}, ${repeats}`;
}
