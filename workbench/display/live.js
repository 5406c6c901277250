// Views "console" and "compare_live", first part: one request while it runs, as text, as a strip of scalings and as
// numbers; and the talk with the kernel. Text from a request is only ever set as text content.

const LIVE_PATIENCE_MS = 4000;
const LIVE_SPOKEN = 8; // adapters named of one token, the largest first
const LIVE_GUTTER = 28, LIVE_TOP = 20, LIVE_FOOT = 8;

const liveBytes = (view) => new Uint8Array(view.buffer ?? view, view.byteOffset ?? 0, view.byteLength).slice().buffer;
const liveNumber = (value, digits) => (value == null || Number.isNaN(value) ? "–" : value.toFixed(digits));

// messages to the kernel; silent(true) when one is not acknowledged in time, silent(false) when one is
function liveTalk(model, silent) {
  const page = Math.random().toString(36).slice(2), waiting = new Map();
  let number = 0, patience = 0;
  return {
    page,
    send(type, content = {}) {
      const id = `${page}.${++number}`;
      waiting.set(id, setTimeout(() => silent(true), LIVE_PATIENCE_MS));
      try { model.send({ type, id, page, ...content }); } catch { silent(true); }
    },
    // ask for everything so far, once: while a kernel is busy, its stream goes on and would make each of its messages ask
    greet() {
      if (performance.now() < patience) return;
      patience = performance.now() + LIVE_PATIENCE_MS;
      this.send("hello");
    },
    greeted() { patience = 0; },
    // whether a message is for this page and means something
    hears(content) {
      if (content.type !== "ack") return !content.page || content.page === page;
      if (waiting.has(content.id)) {
        clearTimeout(waiting.get(content.id));
        waiting.delete(content.id);
        silent(false);
      }
      return false;
    },
    end() {
      for (const timer of waiting.values()) clearTimeout(timer);
      try { model.send({ type: "gone", page }); } catch { /* nobody is left to tell */ }
    },
  };
}

const LIVE_SILENCE = "The kernel does not answer. If a cell is running, this goes on when the cell ends; if the kernel has stopped "
  + "or was restarted, run the cell that made this view again.";

// messages to the kernel, with a sentence while it does not answer
function liveTalkAloud(model, fail) {
  let silence = false;
  return liveTalk(model, (silent) => {
    // said again at each message that is not heard: what was said since may have taken its place
    if (silent) fail(LIVE_SILENCE);
    else if (silence) fail("");
    silence = silent;
  });
}

// where a view says what happens, and what went wrong
function liveSays() {
  const status = make("span", { class: "lw-said", role: "status", "data-lw-status": true }, "Ready.");
  const alert = make("span", { class: "lw-alert", role: "alert", "data-lw-error": true, hidden: true });
  return { status, alert, say(text) { status.textContent = text; }, fail(text) { alert.textContent = text; alert.hidden = !text; } };
}

// heard(content, buffers) at every message, changes[trait]() at every change of a trait; returns what ends it
function liveListen(model, heard, changes) {
  const calls = [["msg:custom", heard], ...Object.entries(changes).map(([name, call]) => [`change:${name}`, call])];
  for (const [event, call] of calls) model.on(event, call);
  return () => { for (const [event, call] of calls) model.off(event, call); };
}

// a draw() that draws once a frame, however often it is called
function liveFrames(el, drawNow) {
  let waiting = 0;
  return () => { waiting ||= requestAnimationFrame(() => { waiting = 0; try { drawNow(); } catch (error) { showError(el, error); } }); };
}

// one request as far as it is known here
function liveStory(start) {
  return { ...start, texts: [], means: [], sources: [], leading: [], stats: null, ended: null };
}

// Add what a "more" message brings; false where something before it is missing.
function liveTake(story, content, buffers) {
  const { first, texts, first_row: firstRow, num_rows: numRows } = content;
  if (first > story.texts.length || firstRow > story.means.length) return false;
  story.texts.push(...texts.slice(story.texts.length - first));
  const width = story.voice.adapters.length;
  const means = new Float32Array(liveBytes(buffers[0])), sources = new Int32Array(liveBytes(buffers[1]));
  for (let row = story.means.length - firstRow; row < numRows; row++) {
    const values = means.subarray(row * width, (row + 1) * width);
    story.means.push(values);
    story.sources.push(sources[row]);
    story.leading.push(liveLead(values));
  }
  story.stats = content.stats;
  return true;
}

// the adapter with the largest mean, and by how much it leads
function liveLead(means) {
  let best = -1, first = -Infinity, second = 0;
  means.forEach((mean, i) => {
    if (mean > first) [second, first, best] = [Math.max(first, 0), mean, i];
    else if (mean > second) second = mean;
  });
  return { adapter: best, lead: best < 0 ? 0 : clamp(first - second, 0, 1) };
}

function liveKind(story, token) {
  if (!story.voice.adapters.length) return "plain";
  if (token >= story.means.length) return story.ended ? "none" : "pending";
  if (story.leading[token].adapter < 0) return "none";
  return story.sources[token] === token ? "computed" : "reused";
}

function liveSpoken(story, token) {
  const { voice } = story, means = story.means[token];
  const place = token < story.promptTokens ? `prompt token ${token + story.hidden}` : `token ${token + story.hidden}`;
  let order = voice.adapters.map((_, i) => i);
  if (order.length > LIVE_SPOKEN && means) order = order.sort((a, b) => means[b] - means[a]).slice(0, LIVE_SPOKEN);
  const rest = voice.adapters.length > order.length ? ` and ${voice.adapters.length - order.length} more` : "";
  const said = means ? order.map((i) => `${voice.adapters[i]} ${liveNumber(means[i], 2)}`).join(", ") + rest : "no scalings yet";
  return `${place} “${(story.texts[token] ?? "").trim()}”: ${said}${means && voice.kind === "mixture" ? `, ${liveKind(story, token).replace("none", "no value")}` : ""}`;
}

// The answer as it is written. point(token or null) tells which one the mouse is on; marks: token -> what is said there.
function liveText(label, point) {
  const caret = make("span", { class: "lw-caret", "aria-hidden": "true" });
  const box = make("div", { class: "lw-text lw-stream", role: "log", "aria-live": "off", "aria-label": label, tabindex: "0", "data-lw-text": true });
  let story = null, spans = [], painted = 0, current = null;
  const part = (name) => make("span", { class: "lw-part" }, name);
  const tokenOf = (event) => event.target.closest?.("[data-token]")?.dataset.token;
  box.addEventListener("pointerover", (event) => tokenOf(event) !== undefined && point(Number(tokenOf(event))));
  box.addEventListener("pointerleave", () => point(null));
  const add = (text, token) => {
    if (token === 0 && story.hidden) box.insertBefore(part(`${story.hidden} earlier tokens of the prompt`), caret);
    if (token === story.promptTokens || token === 0) box.insertBefore(part(token >= story.promptTokens ? "generated" : "prompt"), caret);
    // a newline inside would stretch the token's outline onto the next line
    const span = make("bdi", { class: "lw-token", "data-token": token }, text.endsWith("\n") ? text.slice(0, -1) : text);
    box.insertBefore(span, caret);
    if (text.endsWith("\n")) box.insertBefore(document.createTextNode("\n"), caret);
    spans.push(span);
  };
  const paint = (token) => {
    const span = spans[token], kind = liveKind(story, token), leader = story.leading[token];
    span.classList.remove("lw-pending", "lw-plain", "lw-computed", "lw-reused", "lw-none");
    span.classList.add(`lw-${kind}`);
    if (!leader || leader.adapter < 0) return;
    const changed = token === 0 || token === story.promptTokens || leader.adapter !== story.leading[token - 1].adapter;
    if (changed && story.voice.adapters.length > 1) span.dataset.key = story.voice.keys[leader.adapter];
    span.style.setProperty("--lw-c", story.voice.colours[leader.adapter]);
    span.style.setProperty("--lw-o", leader.lead.toFixed(3));
  };
  return {
    box,
    begin(next) {
      [story, spans, painted, current] = [next, [], 0, null];
      box.replaceChildren(caret);
      box.setAttribute("aria-busy", "true");
    },
    draw() {
      if (!story) return;
      const follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      for (let token = spans.length; token < story.texts.length; token++) { add(story.texts[token], token); paint(token); }
      for (; painted < Math.min(story.means.length, spans.length); painted++) paint(painted);
      if (story.ended && box.getAttribute("aria-busy") === "true") {
        spans.slice(painted).forEach((_, i) => paint(painted + i));
        caret.remove();
        box.setAttribute("aria-busy", "false");
      }
      if (follows) box.scrollTop = box.scrollHeight;
    },
    point(token) {
      current?.classList.remove("lw-current");
      current = spans[token] ?? null;
      current?.classList.add("lw-current");
    },
    mark(token, text) { spans[token]?.setAttribute("data-lw-mark", text); },
  };
}

// Scalings, averaged over the sites: tokens across, adapters down, on the fixed scale 0 … 1. Arrow keys move a cursor.
function liveStrip(label, point) {
  const canvas = make("canvas", { "aria-hidden": "true" });
  const box = make("div", { class: "lw-strip", role: "slider", tabindex: "0", "aria-label": `${label}: tokens across, adapters down. Arrow keys move.`,
    "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0", "aria-valuetext": "nothing yet", "data-lw-strip": true }, canvas);
  let story = null, theme = null, cursor = null, moves = [], place = { first: 0, cell: 8, width: 0 };
  const last = () => story.texts.length - 1;
  const speak = () => {
    const token = cursor ?? last();
    box.setAttribute("aria-valuemax", String(Math.max(0, last())));
    box.setAttribute("aria-valuenow", String(Math.max(0, token)));
    box.setAttribute("aria-valuetext", token < 0 ? "nothing yet" : liveSpoken(story, token));
  };
  box.addEventListener("keydown", (event) => {
    if (!story || last() < 0 || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = cursor ?? last();
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - 10, PageUp: at + 10, Home: 0, End: last() }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    point(clamp(to, 0, last()), true);
  });
  box.addEventListener("focus", () => story && speak());
  box.addEventListener("blur", () => point(null));
  canvas.addEventListener("pointermove", (event) => {
    const x = event.clientX - canvas.getBoundingClientRect().left - LIVE_GUTTER, token = place.first + Math.floor(x / place.cell);
    point(x >= 0 && story && token <= last() ? token : null);
  });
  canvas.addEventListener("pointerleave", () => point(null));
  return {
    box,
    begin(next) { [story, cursor, moves] = [next, null, []]; },
    theme(next) { theme = next; this.draw(); },
    moved(next) { moves = next; },
    point(token) { cursor = token; if (story) { if (document.activeElement === box) speak(); this.draw(); } },
    speak() { if (story) speak(); },
    draw() { if (theme) place = liveDrawStrip(canvas, box, story, theme, cursor, moves) ?? place; },
  };
}

function liveDrawStrip(canvas, box, story, theme, cursor, moves) {
  const { paddingLeft, paddingRight } = getComputedStyle(box), width = box.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
  const adapters = story?.voice.adapters.length ?? 0, row = adapters > 40 ? 3 : adapters > 12 ? 9 : 15;
  const height = LIVE_TOP + Math.max(adapters, 1) * row + LIVE_FOOT, ratio = devicePixelRatio || 1;
  if (width <= 0) return null;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.cssText = `width:${width}px;height:${height}px`;
  const paper = canvas.getContext("2d"), room = width - LIVE_GUTTER;
  paper.scale(ratio, ratio);
  paper.font = "600 10.5px system-ui, sans-serif";
  paper.textBaseline = "middle";
  if (!story || !adapters) {
    paper.font = "12.5px system-ui, sans-serif";
    paper.fillStyle = theme.muted;
    paper.fillText(story ? "no adapters, no scalings" : "The scalings of each token appear here.", 8, height / 2);
    return null;
  }
  const total = Math.max(story.promptTokens + story.max_tokens, story.texts.length), cell = clamp(room / total, 3, 18);
  const shown = Math.floor(room / cell), known = story.texts.length;
  let first = Math.max(0, known - shown);
  if (cursor !== null && cursor < first) first = cursor;
  const stops = theme.scale.map(rgb), at = (token) => LIVE_GUTTER + (token - first) * cell;
  const colour = (value) => {
    if (value > 1) return theme.above;
    if (value < 0) return theme.below;
    const step = value * (stops.length - 1), low = Math.min(Math.floor(step), stops.length - 2);
    return `rgb(${blend(stops[low], stops[low + 1], step - low)})`;
  };
  for (let i = 0; i < adapters; i++) {
    const y = LIVE_TOP + i * row;
    paper.fillStyle = story.voice.colours[i];
    paper.fillRect(2, y + (row > 4 ? 1 : 0), 4, row - (row > 4 ? 3 : 0));
    paper.fillStyle = theme.ink;
    if (row > 10 || (row > 8 && i % 2 === 0)) paper.fillText(story.voice.keys[i], 10, y + row / 2 + 0.5);
    paper.fillStyle = theme.card;
    paper.fillRect(LIVE_GUTTER, y, room, row - 1);
    for (let token = first; token < Math.min(story.means.length, first + shown + 1); token++) {
      const value = story.means[token][i];
      if (Number.isNaN(value)) continue;
      paper.fillStyle = colour(value);
      paper.fillRect(at(token), y, Math.max(cell - (cell > 5 ? 1 : 0), 1), row - 1);
    }
  }
  liveDrawBands(paper, story, theme, { first, shown, cell, at, height });
  if (cursor !== null && cursor < known) {
    paper.strokeStyle = theme.focus;
    paper.lineWidth = 2;
    paper.strokeRect(at(cursor) - 1, LIVE_TOP - 9, cell + 1, height - LIVE_TOP - LIVE_FOOT + 9);
  }
  paper.fillStyle = theme.ink;
  for (const move of moves) {
    const x = at(story.promptTokens + move.token);
    if (x >= LIVE_GUTTER && x <= width) paper.fill(new Path2D(`M${x} 9 l-4 -8 h8 z`));
  }
  return { first, cell, width };
}

// above the cells who leads, below them a solid line for computed scalings and a broken one for reused ones
function liveDrawBands(paper, story, theme, { first, shown, cell, at, height }) {
  for (let token = first; token < Math.min(story.means.length, first + shown + 1); token++) {
    const { adapter, lead } = story.leading[token];
    if (adapter >= 0) {
      paper.globalAlpha = 0.35 + 0.65 * lead;
      paper.fillStyle = story.voice.colours[adapter];
      paper.fillRect(at(token), LIVE_TOP - 8, cell, 5);
      paper.globalAlpha = 1;
    }
    paper.fillStyle = theme.muted;
    const kind = liveKind(story, token), computed = kind === "computed";
    if (kind !== "none") paper.fillRect(at(token), height - LIVE_FOOT + 2, computed ? cell : Math.max(cell / 2, 1), computed ? 2 : 1.5);
  }
  const edge = at(story.promptTokens);
  if (story.promptTokens > first) {
    paper.fillStyle = theme.ink;
    paper.fillRect(edge - 0.5, LIVE_TOP - 9, 1, height - LIVE_TOP - 1);
  }
}

function liveScale() {
  const bar = make("span", { class: "lw-scale-bar" });
  const box = make("div", { class: "lw-scale" }, make("span", {}, "0"), bar, make("span", {}, "1.0"),
    make("span", {}, make("span", { class: "lw-solid" }), " computed ", make("span", { class: "lw-striped" }), " reused"));
  return { box, theme: (theme) => { bar.style.background = `linear-gradient(90deg, ${theme.scale.join(",")})`; } };
}

// the numbers of a request: name -> what is shown, from its stats
const LIVE_METERS = {
  tokens: ["tokens", (s, story) => `${s.generated} / ${story.max_tokens}`],
  tok_s: ["tokens/s", (s) => liveNumber(s.tok_s, s.tok_s < 100 ? 1 : 0)],
  ttft_s: ["first token", (s) => (s.ttft_s == null ? "–" : `${s.ttft_s.toFixed(s.ttft_s < 10 ? 2 : 0)} s`)],
  forwards: ["forwards/token", (s) => (s.generated ? (s.forwards / s.generated).toFixed(2) : "–")],
  scalings: ["scaling passes", (s, { voice }) => (voice.kind === "mixture" ? `${s.computed} run, ${s.reused} reused` : "none needed")],
  drafts: ["drafts accepted", (s) => (s.accepted + s.rejected ? `${s.accepted} of ${s.accepted + s.rejected}` : "none made")],
  cached: ["prompt from cache", (s) => `${s.cached} of ${s.prompt_tokens}`],
};

function liveMeters() {
  const cells = {}, box = make("dl", { class: "lw-meters" });
  for (const [name, [label]] of Object.entries(LIVE_METERS)) {
    cells[name] = make("dd", { "data-lw-meter": name }, "–");
    box.append(make("div", {}, make("dt", {}, label), cells[name]));
  }
  return {
    box,
    draw(story) {
      for (const [name, [, said]] of Object.entries(LIVE_METERS)) cells[name].textContent = story?.stats ? said(story.stats, story) : "–";
    },
  };
}

const LIVE_REASONS = { stop: "ended by itself", length: "reached max tokens", cancelled: "stopped", deadline: "out of time", error: "failed" };

function liveEnding(story) {
  const { reason, error, seed, edited, stats } = story.ended;
  if (reason === "error") return `It failed: ${error}`;
  const count = `${stats.generated} ${stats.generated === 1 ? "token" : "tokens"}`;
  return [`Finished: ${count}, ${LIVE_REASONS[reason] ?? reason} (${reason}), seed ${seed}`, edited].filter(Boolean).join("; ") + ".";
}
