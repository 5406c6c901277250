// View "scalings", first part: what a trace says, as elements. `payload.py` says what the model holds.

const LEADER = "leader";

function readModel(model) {
  const bytes = (name) => bytesOf(model, name);
  const data = { values: bytes("values"), means: new Float32Array(bytes("means").buffer), outliers: new Map() };
  const plain = ["title", "facts", "edits", "note", "notes", "shape", "codes", "adapters", "keys", "colours", "themes", "tokens",
    "labels", "rows", "generated", "positions", "source", "draft", "time_s", "shares"];
  for (const name of plain) data[name] = model.get(name);
  data.leaders = new Uint16Array(bytes("leaders").buffer);
  const at = new Uint32Array(bytes("outlier_at").buffer);
  const exact = new Float32Array(bytes("outlier_value").buffer);
  at.forEach((index, i) => data.outliers.set(index, exact[i]));
  [data.numTokens, data.numRows, data.numAdapters] = data.shape;
  data.promptTokens = data.generated.indexOf(1) < 0 ? data.numTokens : data.generated.indexOf(1);
  addLeaders(data);
  return data;
}

function addLeaders(data) {
  data.leading = new Int32Array(data.numTokens).fill(-1);
  data.lead = new Float32Array(data.numTokens);
  for (let token = 0; token < data.numTokens; token++) {
    let first = -Infinity, second = 0;
    for (let adapter = 0; adapter < data.numAdapters; adapter++) {
      const mean = data.means[token * data.numAdapters + adapter];
      if (mean > first) [second, first, data.leading[token]] = [Math.max(first, 0), mean, adapter];
      else if (mean > second) second = mean;
    }
    data.lead[token] = data.leading[token] < 0 ? 0 : clamp(first - second, 0, 1);
  }
}

function valueAt(data, token, row, adapter) {
  const index = (token * data.numRows + row) * data.numAdapters + adapter;
  const code = data.values[index];
  const { steps, below, above, missing } = data.codes;
  if (code === missing) return "–";
  if (code === below || code === above) {
    const mark = code === above ? "▲" : "▼";
    return data.outliers.has(index) ? `${data.outliers.get(index).toFixed(2)} ${mark}` : `${mark} ${code === above ? "> 1" : "< 0"}`;
  }
  return (code / steps).toFixed(2);
}

const meanAt = (data, token, adapter) => data.means[token * data.numAdapters + adapter];

function legend(data) {
  const parts = Object.keys(data.shares).filter((part) => data.shares[part]);
  const body = make("tbody");
  data.adapters.forEach((name, i) => {
    const share = data.shares.all[i];
    body.append(make("tr", {}, make("th", { scope: "row" }, swatch(data.colours[i]), make("b", {}, data.keys[i]), " ", make("bdi", {}, name)),
      make("td", { class: "lw-bar-cell" }, shareBar(share, data.colours[i])), ...parts.map((part) => make("td", {}, percent(data.shares[part][i])))));
  });
  const heads = parts.map((part) => make("th", { scope: "col" }, part));
  const table = make("table", { class: "lw-shares" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "adapter"), make("td"), ...heads)), body);
  const marks = make("p", { class: "lw-marks" },
    "In the text: a letter where the lead changes; the stronger the tint, the larger the lead. Underline: ",
    make("span", { class: "lw-key lw-computed" }, "computed"), " ", make("span", { class: "lw-key lw-reused" }, "reused"), " ",
    make("span", { class: "lw-key lw-none" }, "none, or no value"), ".");
  return make("div", { class: "lw-legend" }, make("div", { class: "lw-label" }, "Mean share of the scalings"), scrollable(make("div", { class: "lw-scroll", tabindex: data.numAdapters > 10 ? "0" : undefined }, table)), marks);
}

function textPanel(view) {
  const { data } = view;
  const box = make("div", { class: "lw-text", role: "listbox", "aria-label": "The text, one option per token. Arrow keys move." });
  view.spans = data.tokens.map((text, token) => {
    if (token === data.promptTokens || token === 0) {
      const name = data.generated[token] ? "generated" : "prompt";
      box.append(make("span", { class: "lw-part", role: "presentation" }, name));
    }
    const leader = data.leading[token];
    const kind = data.source[token] < 0 ? "none" : data.source[token] === data.positions[token] ? "computed" : "reused";
    const changed = token === 0 || token === data.promptTokens || leader !== data.leading[token - 1];
    const span = make("bdi", {
      class: `lw-token lw-${kind}`, role: "option", tabindex: token ? "-1" : "0",
      "data-token": token, "data-key": changed && leader >= 0 && data.numAdapters > 1 ? data.keys[leader] : undefined,
      style: leader < 0 ? undefined : `--lw-c:${data.colours[leader]};--lw-o:${data.lead[token].toFixed(3)}`,
    }, text.endsWith("\n") ? text.slice(0, -1) : text);
    // a newline inside would stretch the token's outline onto the next line
    box.append(span, text.endsWith("\n") ? "\n" : "");
    return span;
  });
  const tokenOf = (event) => event.target.closest?.("[data-token]")?.dataset.token;
  const on = (name, call) => box.addEventListener(name, (event) => tokenOf(event) !== undefined && call(Number(tokenOf(event)), event));
  on("pointerover", (token) => view.point({ token }));
  box.addEventListener("pointerleave", () => view.point(null));
  on("click", (token) => view.move({ token }, true));
  on("focusin", (token) => view.move({ token }, true));
  on("keydown", (token, event) => {
    const next = { ArrowLeft: token - 1, ArrowRight: token + 1, Home: 0, End: data.numTokens - 1,
      ArrowUp: lineNeighbour(view, token, -1), ArrowDown: lineNeighbour(view, token, 1) }[event.key];
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    view.spans[clamp(next, 0, data.numTokens - 1)].focus({ preventScroll: true });
  });
  return box;
}

// the token above or below: the first one on another line whose left edge is nearest
function lineNeighbour(view, token, step) {
  const from = view.spans[token].getClientRects()[0];
  let best = token, distance = Infinity, line = null;
  for (let other = token + step; view.spans[other]; other += step) {
    const box = view.spans[other].getClientRects()[0];
    if (!box || Math.abs(box.top - from.top) < 4) continue;
    if (line !== null && Math.abs(box.top - line) >= 4) break;
    line = box.top;
    if (Math.abs(box.left - from.left) < distance) [best, distance] = [other, Math.abs(box.left - from.left)];
  }
  return best;
}

function readout(view) {
  const { data } = view;
  const token = make("bdi", { class: "lw-now" }), place = make("span"), status = make("div", { class: "lw-status" });
  const site = make("div", { class: "lw-site" }), rows = make("div", { class: "lw-values" });
  const box = make("div", { class: "lw-readout", "aria-live": "polite", "aria-atomic": "true" },
    make("div", { class: "lw-label" }, token, " ", place), status, rows, site);
  view.read = ({ token: at, row }) => {
    token.textContent = data.tokens[at].trimEnd() || "␣".repeat(data.tokens[at].length);
    place.textContent = `token ${data.positions[at]}`;
    status.textContent = statusOf(data, at);
    site.textContent = row == null ? "Point at a cell, or use the arrow keys there, for a single site." : `here = ${data.rows.labels[row]}, rounded to ±${(0.5 / data.codes.steps).toFixed(3)}`;
    let order = data.adapters.map((_, i) => i);
    if (order.length > 12) order = order.sort((a, b) => meanAt(data, at, b) - meanAt(data, at, a)).slice(0, 12);
    rows.replaceChildren(make("span"), make("span"), make("i", {}, "mean"), make("i", {}, row == null ? "" : "here"), ...order.flatMap((i) => {
      const mean = meanAt(data, at, i);
      return [make("span", { class: "lw-name" }, swatch(data.colours[i]), make("b", {}, data.keys[i]), " ", make("bdi", {}, data.adapters[i])),
        make("span", { class: "lw-bar-cell" }, shareBar(mean, data.colours[i])), make("span", { "data-mean": i }, Number.isNaN(mean) ? "–" : mean.toFixed(3)),
        make("span", { "data-here": i }, row == null ? "" : valueAt(data, at, row, i))];
    }));
  };
  return box;
}

function controls(view) {
  const { data } = view;
  const adapters = data.adapters.map((name, i) => ({ value: i, text: `${data.keys[i]} ${name}`, colour: data.colours[i] }));
  const kinds = [...new Set(data.rows.kinds)];
  const bar = make("div", { class: "lw-controls" }, choice(view, "Map", "adapter", [{ value: LEADER, text: "who leads" }, ...adapters]));
  if (kinds.length > 1) bar.append(choice(view, "Sites", "site_group", [{ value: "", text: "all" }, ...kinds.map((kind) => ({ value: kind, text: kind }))]));
  const zoom = make("input", { type: "range", min: "0", max: "1", step: "0.01", value: "0", "aria-label": "Width of a token",
    oninput: (event) => { view.zoom = Number(event.target.value); view.drawNow(); view.reveal(); } });
  bar.append(make("label", { class: "lw-choice" }, "zoom ", zoom));
  return bar;
}
