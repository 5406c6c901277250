// View "explore", first part: the data. What Python sends is a slab: codes [adapter, row, column] of one byte, where a
// column is a block of tokens and a row one site or several (slabs.py). The overview covers the whole trace; a window is
// a finer slab of a part, asked for when the overview is too coarse for the zoom.

const NO_LEADER = -1;
const PATIENCE_MS = 3000;

function typed(model, name, Kind) {
  const bytes = bytesOf(model, name);
  return bytes.length ? new Kind(bytes.buffer) : null;
}

function readExplore(model) {
  const data = { ...model.get("labels"), live: Boolean(model.get("live")) && typeof model.send === "function" };
  [data.numTokens, data.numSites, data.numAdapters] = data.shape;
  data.source = typed(model, "source", Int32Array);
  // of a static page: exact means over every site [token, adapter]
  data.means = model.get("means") ? typed(model, "means", Float32Array) : null;
  data.positions = typed(model, "positions", Int32Array) ?? Int32Array.from({ length: data.numTokens }, (_, i) => data.first_position + i);
  data.draft = typed(model, "draft", Int8Array) ?? [];
  data.time_s = typed(model, "time_s", Float32Array) ?? [];
  data.generated = new Uint8Array(data.numTokens);
  data.parts.forEach(([start, generated], i) => data.generated.fill(generated, start, data.parts[i + 1]?.[0] ?? data.numTokens));
  data.sources = runsOf(data.numTokens, (token) => (data.source[token] < 0 ? 0 : data.source[token] === data.positions[token] ? 1 : 2));
  data.values = Float32Array.from({ length: 256 }, (_, code) => valueOfCode(data, code));
  data.overview = readSlab(data, { start: 0, stop: data.numTokens, block: data.block }, bytesOf(model, "codes"), bytesOf(model, "leaders"), bytesOf(model, "row_of"));
  data.windows = [];
  return data;
}

function readSlab(data, { start, stop, block }, codes, leaders, rowOf) {
  const columns = Math.ceil((stop - start) / block);
  const wide = data.numAdapters > 254 ? new Uint16Array(leaders.buffer) : leaders;
  const slab = { start, stop, block, columns, codes, leaders: wide, rowOf: new Uint16Array(rowOf.buffer), kept: new Map() };
  slab.rows = codes.length / (columns * data.numAdapters);
  slab.exact = block === 1 && slab.rows === data.numSites;
  return slab;
}

// [[start, stop, kind], …] of equal neighbours
function runsOf(length, kindOf) {
  const runs = [];
  for (let start = 0, stop; start < length; start = stop) {
    const kind = kindOf(start);
    for (stop = start + 1; stop < length && kindOf(stop) === kind; stop++);
    runs.push([start, stop, kind]);
  }
  return runs;
}

function valueOfCode(data, code) {
  const { codes, scale } = data;
  if (code === codes.missing || (code > codes.steps && code < codes.below)) return NaN;
  const part = code === codes.below ? 0 : code === codes.above ? 1 : code / codes.steps;
  return scale.log ? scale.low * (scale.high / scale.low) ** part : scale.low + part * (scale.high - scale.low);
}

// from 0 at the lower end of the scale to 1 at the upper; further where the value is
function partOfScale({ scale }, value) {
  if (value == null) return NaN;
  return scale.log ? Math.log(Math.max(value, scale.low) / scale.low) / Math.log(scale.high / scale.low) : (value - scale.low) / (scale.high - scale.low);
}

function textOfCode(data, code) {
  const { codes, scale } = data;
  if (code === codes.missing) return "–";
  if (code === codes.above) return `▲ > ${scale.high}`;
  if (code === codes.below) return `▼ < ${scale.low}`;
  return textOfValue(data, data.values[code]);
}

function textOfValue(data, value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  return data.scale.log ? value.toPrecision(Math.max(digits - 1, 2)) : value.toFixed(digits);
}

function kept(slab, key, compute) {
  if (!slab.kept.has(key)) slab.kept.set(key, compute());
  return slab.kept.get(key);
}

// The slab of half as many columns: means of the codes of two, but a mark stays a mark.
function coarser(data, slab) {
  return kept(slab, "coarser", () => {
    const { columns, rows, codes } = slab, { steps, missing } = data.codes, n = data.numAdapters, half = Math.ceil(columns / 2);
    const out = new Uint8Array(n * rows * half);
    for (let line = 0; line < n * rows; line++) for (let c = 0; c < half; c++) {
      const a = codes[line * columns + 2 * c], b = 2 * c + 1 < columns ? codes[line * columns + 2 * c + 1] : missing;
      out[line * half + c] = b === missing ? a : a === missing ? b : a > steps ? a : b > steps ? b : (a + b + 1) >> 1;
    }
    const next = { ...slab, block: 2 * slab.block, columns: half, codes: out, exact: false, kept: new Map() };
    next.leaders = leadersOf(data, next, [...Array(n).keys()], slab.leaders);
    return next;
  });
}

// The adapter with the largest code at every cell. Where codes tie, `finer` (leaders of twice as many columns) decides.
function leadersOf(data, slab, adapters, finer = null) {
  const { columns, rows, codes } = slab, { steps, above, missing } = data.codes, size = rows * columns;
  const none = data.numAdapters > 254 ? 65535 : 255, wide = finer ? Math.min(2 * columns, finer.length / rows) : 0;
  const out = data.numAdapters > 254 ? new Uint16Array(size) : new Uint8Array(size), best = new Int16Array(size).fill(-1);
  out.fill(none);
  const rank = Int16Array.from({ length: 256 }, (_, code) => (code === missing ? -1 : code === above ? steps + 1 : code > steps ? 0 : code));
  for (const adapter of adapters) {
    const first = adapter * size;
    for (let i = 0; i < size; i++) {
      const value = rank[codes[first + i]];
      if (value > best[i]) [best[i], out[i]] = [value, adapter];
    }
  }
  if (!finer) return out;
  for (let row = 0; row < rows; row++) for (let c = 0; c < columns; c++) {
    const i = row * columns + c, known = finer[row * wide + 2 * c];
    if (known !== none && out[i] !== known && rank[codes[known * size + i]] === best[i]) out[i] = known;
  }
  return out;
}

// What is shown of a slab: means over the shown sites [adapter, column], NaN where there is no value.
function meansOf(data, slab, filter) {
  return kept(slab, `means ${filter.key}`, () => {
    const { columns, rows, codes, rowOf } = slab, weights = new Uint16Array(rows);
    for (const site of filter.sites) weights[rowOf[site]] += 1;
    const out = new Float32Array(filter.adapters.length * columns), counts = new Float64Array(columns), sums = new Float64Array(columns);
    filter.adapters.forEach((adapter, k) => {
      counts.fill(0);
      sums.fill(0);
      for (let row = 0; row < rows; row++) {
        const weight = weights[row], at = (adapter * rows + row) * columns;
        if (!weight) continue;
        for (let c = 0; c < columns; c++) {
          const value = data.values[codes[at + c]];
          if (value === value) { sums[c] += weight * value; counts[c] += weight; }
        }
      }
      for (let c = 0; c < columns; c++) out[k * columns + c] = sums[c] / counts[c];
    });
    return out;
  });
}

// per column: [leading adapter or NO_LEADER, its distance to the second]
function leadsOf(data, slab, filter) {
  return kept(slab, `leads ${filter.key}`, () => {
    const means = meansOf(data, slab, filter), { columns } = slab;
    const leaders = new Int32Array(columns).fill(NO_LEADER), lead = new Float32Array(columns);
    for (let c = 0; c < columns; c++) {
      let first = -Infinity, second = 0;
      filter.adapters.forEach((adapter, k) => {
        const mean = means[k * columns + c];
        if (mean > first) [second, first, leaders[c]] = [Math.max(first, 0), mean, adapter];
        else if (mean > second) second = mean;
      });
      lead[c] = leaders[c] < 0 ? 0 : clamp((first - second) / (data.scale.log ? first : data.scale.high), 0, 1);
    }
    return { leaders, lead };
  });
}

const shownLeaders = (data, slab, filter) => (filter.adapters.length === data.numAdapters ? slab.leaders
  : kept(slab, `leaders ${filter.adapters}`, () => leadersOf(data, slab, filter.adapters)));

// The finest slab that has a token: a window, or the overview.
function slabAt(data, token) {
  const found = data.windows.filter((slab) => slab.start <= token && token < slab.stop);
  return found.reduce((best, slab) => (finer(slab, best) ? slab : best), data.overview);
}

const finer = (one, other) => one.block < other.block || (one.block === other.block && one.rows > other.rows);

function codeAt(data, token, site, adapter) {
  const slab = slabAt(data, token), column = Math.floor((token - slab.start) / slab.block);
  return slab.codes[(adapter * slab.rows + slab.rowOf[site]) * slab.columns + column];
}

const hasExactMeans = (data, filter) => data.means !== null && filter.sites.length === data.numSites;

function meanOf(data, filter, token, k) {
  if (hasExactMeans(data, filter)) return data.means[token * data.numAdapters + filter.adapters[k]];
  const slab = slabAt(data, token);
  return meansOf(data, slab, filter)[k * slab.columns + Math.floor((token - slab.start) / slab.block)];
}

function leadAt(data, filter, token) {
  const slab = slabAt(data, token), { leaders, lead } = leadsOf(data, slab, filter), column = Math.floor((token - slab.start) / slab.block);
  return [leaders[column], lead[column]];
}

function leaderAtCell(data, filter, token, site) {
  const slab = slabAt(data, token), column = Math.floor((token - slab.start) / slab.block);
  const leader = shownLeaders(data, slab, filter)[slab.rowOf[site] * slab.columns + column];
  return leader < data.numAdapters ? leader : NO_LEADER;
}

// Mean over the tokens of a span and the shown sites, per shown adapter.
function spanMeans(data, filter, start, stop) {
  if (hasExactMeans(data, filter)) return filter.adapters.map((_, k) => meanOfSpan(start, stop, (token) => meanOf(data, filter, token, k)));
  const covering = data.windows.filter((slab) => slab.start <= start && stop <= slab.stop);
  const slab = covering.reduce((best, one) => (finer(one, best) ? one : best), data.overview);
  const means = meansOf(data, slab, filter), from = Math.floor((start - slab.start) / slab.block);
  return filter.adapters.map((_, k) => {
    let sum = 0, count = 0;
    for (let c = from, left = slab.start + c * slab.block; left < stop; c++, left += slab.block) {
      const mean = means[k * slab.columns + c], tokens = Math.min(left + slab.block, stop) - Math.max(left, start);
      if (mean === mean) { sum += tokens * mean; count += tokens; }
    }
    return sum / count;
  });
}

function meanOfSpan(start, stop, meanAt) {
  let sum = 0, count = 0;
  for (let token = start; token < stop; token++) {
    const mean = meanAt(token);
    if (mean === mean) { sum += mean; count += 1; }
  }
  return sum / count;
}

// Questions to Python. One of a kind is under way; what is asked meanwhile waits, only the latest of it; an answer to
// another question, or about another trace, is dropped. While one has had no answer for three seconds, `silent(true)`;
// the next is asked then, for an answer may have been lost.
function questions(model, serialOf, silent) {
  const open = new Map();
  const send = (kind, body, take) => {
    const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
    const one = { id, take, next: null, isLate: false, timer: setTimeout(() => lose(kind, one), PATIENCE_MS) };
    open.set(kind, one);
    try { model.send({ type: kind, id, serial: serialOf(), ...body }); } catch { silent(true); }
  };
  const lose = (kind, one) => {
    silent(true);
    one.isLate = true;
    if (one.next) send(kind, ...one.next);
  };
  const hear = (content, buffers) => {
    const asked = open.get(content.type);
    if (!asked || asked.id !== content.id) return;
    clearTimeout(asked.timer);
    open.delete(content.type);
    silent(false);
    if (content.serial === serialOf() && !content.is_refused) asked.take(content, buffers ?? []);
    if (asked.next) send(content.type, ...asked.next);
  };
  model.on("msg:custom", hear);
  return {
    ask: (kind, body, take) => {
      const one = open.get(kind);
      if (one && !one.isLate) one.next = [body, take];
      else send(kind, body, take);
    },
    end: () => { for (const { timer } of open.values()) clearTimeout(timer); open.clear(); model.off("msg:custom", hear); },
  };
}
