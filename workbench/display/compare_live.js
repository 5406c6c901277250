// View "compare_live": one prompt under several settings, side by side while they are written. Messages as in console.js,
// with one entry per column. Everything a test may want to reach has an attribute:
//   root [data-lw-compare-live], whose data-lw-state is idle | running | ended; [data-lw-prompt] [data-lw-run] [data-lw-stop]
//   [data-lw-status] [data-lw-error]; in [data-lw-column="0"]: [data-lw-text] with [data-token], of which the first that
//   differs from column 0 has data-lw-mark, [data-lw-strip] [data-lw-meter="tok_s"] (and others) [data-lw-verdict]

const compareSentence = (said) => (said ? `${said[0].toUpperCase()}${said.slice(1)}${/[.!?]$/.test(said) ? "" : "."}` : "");

function compareColumn(index, label, point) {
  const at = make("p", { class: "lw-at", "aria-hidden": "true" });
  const chips = make("span", { class: "lw-chips" }), verdict = make("p", { class: "lw-verdict", "data-lw-verdict": true });
  const text = liveText(`Answer under ${label}`, point), meters = liveMeters();
  const strip = liveStrip(`Scalings under ${label}, mean over the sites`, point);
  const box = make("section", { class: "lw-column", "data-lw-column": index, "aria-label": `Setting ${index + 1}: ${label}` },
    make("div", { class: "lw-column-head" }, make("span", { class: "lw-number", "aria-hidden": "true" }, String(index + 1)), make("bdi", { class: "lw-label" }, label), chips),
    text.box, verdict, strip.box, at, meters.box);
  const column = {
    box, text, strip, meters, verdict, story: null,
    begin(start) {
      column.story = liveStory({ ...start, promptTokens: start.prompt_tokens });
      verdict.textContent = "";
      const { adapters, keys, colours, label: who } = start.voice;
      chips.replaceChildren(...(adapters.length ? adapters.map((name, i) => make("span", {}, swatch(colours[i]), make("b", {}, keys[i]), " ", make("bdi", {}, name))) : [who]));
      text.begin(column.story);
      strip.begin(column.story);
    },
    // the token that is looked at in any column, by default each column's newest
    draw(pointed) {
      const { story } = column;
      text.draw();
      text.point(pointed);
      strip.point(pointed);
      strip.speak();
      meters.draw(story);
      const token = pointed ?? (story ? story.means.length - 1 : -1);
      at.textContent = token >= 0 && token < story.texts.length && story.voice.adapters.length ? liveSpoken(story, token) : "";
    },
  };
  return column;
}

// the first difference of each column from the first one: marked there, and with the columns' numbers in the first
function compareMarks(columns, diverged) {
  const leaving = new Map();
  diverged.forEach((token, i) => {
    if (token === null || !columns[i].story) return;
    columns[i].text.mark(token, "≠ 1");
    leaving.set(token, [...(leaving.get(token) ?? []), i + 1]);
    if (!columns[i].judged) columns[i].verdict.textContent = `Differs from 1 at token ${token + columns[i].story.hidden}.`;
  });
  for (const [token, numbers] of leaving) columns[0].text.mark(token, `≠ ${numbers.join(", ")}`);
}

function compareForm(model, run, stop, status, alert) {
  const prompt = make("textarea", { rows: "3", spellcheck: "false", "data-lw-prompt": true, "aria-keyshortcuts": "Control+Enter Meta+Enter",
    placeholder: "What is to be continued under every setting? Ctrl+Enter runs." });
  prompt.value = model.get("prompt");
  prompt.addEventListener("change", () => { model.set("prompt", prompt.value); model.save_changes(); });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    run();
  });
  const go = make("button", { type: "button", class: "lw-button lw-go", "data-lw-run": true, onclick: run }, "Run all");
  const end = make("button", { type: "button", class: "lw-button lw-halt", "data-lw-stop": true, onclick: stop }, "Stop all");
  const box = make("div", { class: "lw-ask" }, make("label", { class: "lw-field lw-wide" }, make("span", {}, "Prompt"), prompt),
    make("div", { class: "lw-go-row" }, go, end, status, alert));
  return {
    box, typed: () => ({ prompt: prompt.value }),
    pull() { if (document.activeElement !== prompt) prompt.value = model.get("prompt"); },
    lock(running) { go.setAttribute("aria-disabled", String(running)); end.setAttribute("aria-disabled", String(!running)); },
  };
}

function compareRoot(model, form, columns, scale) {
  const facts = make("div", { class: "lw-facts" });
  for (const [name, value] of model.get("facts")) facts.append(make("span", {}, make("span", { class: "lw-fact" }, name), " ", make("bdi", {}, value)));
  const grid = make("div", { class: "lw-columns" }, ...columns.map((column) => column.box));
  const root = make("div", { class: "lw lw-compare-live", "data-lw-compare-live": true, "data-lm-suppress-shortcuts": "true" },
    make("div", { class: "lw-head" }, make("div", { class: "lw-title", role: "heading", "aria-level": "2" }, model.get("title")), facts),
    form.box, grid, scale.box);
  return { root, grid };
}

function compareBegin(view, content) {
  const { columns, says, talk } = view;
  talk.greeted();
  view.current = { run: content.run, diverged: [], ended: null };
  columns.forEach((column, i) => { column.judged = false; column.begin(content.columns[i]); });
  says.fail("");
  says.say(`Running ${columns.length} settings together …`);
}

function compareMore({ columns, current, talk }, content, buffers) {
  for (const each of content.columns) {
    const column = columns[each.column], { story } = column;
    if (!liveTake(story, each, buffers.slice(2 * each.column, 2 * each.column + 2))) return talk.greet();
    if (each.ended && !story.ended) {
      Object.assign(story, { ended: each.ended });
      if (each.ended.reason === "error") [column.judged, column.verdict.textContent] = [true, liveEnding(story)];
    }
  }
  current.diverged = content.diverged;
}

function compareEnd({ columns, current, says }, content) {
  current.ended = content;
  content.says.forEach((said, i) => { if (said) [columns[i].judged, columns[i].verdict.textContent] = [true, compareSentence(said)]; });
  says.say(content.compared ? `Finished. ${compareSentence(content.floor)}` : "Finished; there is nothing to compare.");
  if (!content.compared) says.fail(content.floor);
}

function compareHears(view, content, buffers) {
  const { current, says, talk } = view;
  if (!talk.hears(content)) return;
  if (content.type === "say") content.error ? says.fail(content.text) : says.say(content.text);
  else if (content.type === "start") compareBegin(view, content);
  else if (content.run !== current?.run) { if (content.type === "more" && !(current?.run > content.run)) talk.greet(); }
  else if (content.type === "more") compareMore(view, content, buffers);
  else if (content.type === "end") compareEnd(view, content);
  view.draw();
}

function compareView(model, el) {
  const says = liveSays(), talk = liveTalkAloud(model, says.fail), view = { talk, says, current: null, pointed: null };
  const running = () => view.current !== null && !view.current.ended;
  const run = () => {
    if (running()) return says.fail("The settings run already; stop them first.");
    says.fail("");
    talk.send("run", view.form.typed());
  };
  view.draw = liveFrames(el, () => view.drawNow());
  view.form = compareForm(model, run, () => running() && talk.send("stop"), says.status, says.alert);
  view.scale = liveScale();
  view.columns = model.get("columns").map(({ label }, i) => compareColumn(i, label, (token) => { view.pointed = token; view.draw(); }));
  Object.assign(view, compareRoot(model, view.form, view.columns, view.scale));
  view.drawNow = () => {
    const { current } = view;
    view.root.dataset.lwState = current === null ? "idle" : current.ended ? "ended" : "running";
    view.form.lock(running());
    view.columns.forEach((column) => column.draw(view.pointed));
    if (current) compareMarks(view.columns, current.diverged);
  };
  return view;
}

function renderCompareLive({ model, el }) {
  const view = compareView(model, el), { talk, form, columns, scale, root } = view;
  const unlisten = liveListen(model, (content, buffers) => compareHears(view, content, buffers), { prompt: () => form.pull() });
  const sizes = new ResizeObserver(view.draw);
  sizes.observe(view.grid);
  el.replaceChildren(root);
  const untheme = followTheme(model, root, (theme) => { scale.theme(theme); columns.forEach((column) => column.strip.theme(theme)); });
  view.drawNow();
  talk.greet();
  return () => {
    talk.end();
    unlisten();
    sizes.disconnect();
    untheme();
  };
}
