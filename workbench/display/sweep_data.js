// First part of the view of a sweep: the table, grouped into points with medians and intervals. The rule for intervals
// is that of `medians.py`, so that the page and Python say the same.

const SWEEP_NONE = "none", SWEEP_CONFIDENCE = 0.95, SWEEP_FEW = 6, SWEEP_MOST_EXACT = 64, SWEEP_Z = 1.959963984540054;

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
    .map((group) => ({ ...group, ...sweepMedian(group.values) }));
}

// how many of the sorted values lie outside the median's interval, on each side
function sweepOutside(n) {
  if (n > SWEEP_MOST_EXACT) return Math.max(0, Math.floor((n - SWEEP_Z * Math.sqrt(n) - 1) / 2));
  let outside = -1, chance = 2 ** -n, tail = 0;
  for (let k = 0; outside < Math.floor((n - 1) / 2); k++) {
    tail += chance;
    if (2 * tail > 1 - SWEEP_CONFIDENCE) break;
    outside++;
    chance *= (n - k) / (k + 1);
  }
  return Math.max(outside, 0);
}

function sweepMedian(values) {
  const n = values.length, sorted = Float64Array.from(values).sort(), half = Math.floor(n / 2);
  const median = !n ? NaN : n % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  if (n < 2) return { median, low: NaN, high: NaN, n };
  const outside = sweepOutside(n);
  return { median, low: sorted[outside], high: sorted[n - 1 - outside], n };
}

// what the intervals beside medians of so many repeats are called
function sweepIntervalWords(counts) {
  const several = [...new Set(counts)].filter((n) => n > 1).sort((a, b) => a - b);
  const few = several.filter((n) => n < SWEEP_FEW);
  if (!several.length) return "";
  if (few.length && few.length < several.length) return `95 % interval, or the range of repeats where there are fewer than ${SWEEP_FEW}`;
  return few.length ? `range of ${few.length > 1 ? `${few[0]} to ${few.at(-1)}` : few[0]} repeats` : "95 % interval";
}

// axes that vary among the rows of one point: its median is over them, too
function sweepMerged(data, choice, kept) {
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
  const repeats = point.n === 1 ? "n = 1, no interval" : `${sweepIntervalWords([point.n])} ${sweepNumber(point.low)} to ${sweepNumber(point.high)}, n = ${point.n}`;
  return `${where}: ${data.columns[choice.y].title} ${sweepNumber(point.median)}, ${repeats}`;
}
