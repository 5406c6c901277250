// View "console": prompt, who answers, the answer while it is written, and a fader for each adapter. What is typed lives
// in the model's traits (prompt, voice, values, chat), and goes with the wish to run; what runs comes as messages: start, more (binary rows), end, say,
// ack. Everything a test may want to reach has an attribute:
//   root [data-lw-console], whose data-lw-state is idle | running | ended; [data-lw-prompt] [data-lw-voice] [data-lw-chat]
//   [data-lw-box="max_tokens"] (and the other settings) [data-lw-run] [data-lw-stop] [data-lw-status] [data-lw-error]
//   [data-lw-text] with [data-token] [data-lw-strip] [data-lw-mode="bias"] [data-lw-fader="0"] [data-lw-rest="0"]
//   [data-lw-level="0"] [data-lw-rest-all] [data-lw-why] [data-lw-meter="tok_s"] (tokens, ttft_s, forwards, …)

const CONSOLE_MODES = {
  bias: "Added to the adapter's logit at every site: −4 fades it out, +4 lets it take over. The others share what is left.",
  force: "Fixes the adapter's weight at every site, 0 to 1; nothing else is changed.",
};

function consoleHead(model, talk) {
  const facts = make("div", { class: "lw-facts" });
  for (const [name, value] of model.get("facts")) facts.append(make("span", {}, make("span", { class: "lw-fact" }, name), " ", make("bdi", {}, value)));
  if (model.get("also")) facts.append(make("span", {}, make("span", { class: "lw-fact" }, "Also set"), " ", make("bdi", {}, model.get("also"))));
  return make("div", { class: "lw-head" }, make("div", { class: "lw-title", role: "heading", "aria-level": "2" }, model.get("title")), facts);
}

function consoleVoices(model) {
  const list = make("select", { "data-lw-voice": true });
  const fill = () => {
    list.replaceChildren(...model.get("voices").map((voice) => make("option", { value: voice.id },
      voice.kind === "mixture" ? `${voice.label} (${voice.adapters.join(", ")})` : voice.label)));
    list.value = model.get("voice");
  };
  fill();
  return { list, fill };
}

// the form: prompt, who answers, number boxes, run and stop
function consoleForm(view) {
  const { model, talk } = view;
  const set = (name, value) => { model.set(name, value); model.save_changes(); };
  const prompt = make("textarea", { rows: "4", spellcheck: "false", "data-lw-prompt": true, "aria-keyshortcuts": "Control+Enter Meta+Enter",
    placeholder: "What is to be continued? Ctrl+Enter runs." });
  prompt.value = model.get("prompt");
  prompt.addEventListener("change", () => set("prompt", prompt.value));
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    view.run();
  });
  const voices = consoleVoices(model);
  voices.list.addEventListener("change", () => { set("voice", voices.list.value); view.refresh(); });
  voices.list.addEventListener("pointerdown", () => talk.send("voices"));
  voices.list.addEventListener("focus", () => talk.send("voices"));
  const boxes = model.get("boxes").map((box) => {
    const input = make("input", { type: "text", inputmode: box.keyboard, size: "6", autocomplete: "off", placeholder: box.empty, "data-lw-box": box.name });
    input.value = model.get("values")[box.name] ?? "";
    input.addEventListener("change", () => set("values", { ...model.get("values"), [box.name]: input.value }));
    input.addEventListener("keydown", (event) => event.key === "Enter" && view.run());
    return make("label", { class: "lw-field", title: box.name }, make("span", {}, box.label), input);
  });
  const chat = make("input", { type: "checkbox", "data-lw-chat": true });
  chat.checked = model.get("chat");
  chat.addEventListener("change", () => set("chat", chat.checked));
  const run = make("button", { type: "button", class: "lw-button lw-go", "data-lw-run": true, onclick: () => view.run() }, "Run");
  const stop = make("button", { type: "button", class: "lw-button lw-halt", "data-lw-stop": true, onclick: () => view.stop() }, "Stop");
  const chats = make("label", { class: "lw-check" }, chat, " as a chat message");
  chats.hidden = !model.get("can_chat");
  const box = make("div", { class: "lw-ask" },
    make("label", { class: "lw-field lw-wide" }, make("span", {}, "Prompt"), prompt),
    make("label", { class: "lw-field lw-who" }, make("span", {}, "Who answers"), voices.list),
    make("div", { class: "lw-fields" }, ...boxes),
    make("div", { class: "lw-go-row" }, run, stop, chats, view.status, view.alert));
  return {
    box, run, stop, voices,
    // what Python changed, unless it is being typed over
    pull() {
      if (document.activeElement !== prompt) prompt.value = model.get("prompt");
      chat.checked = model.get("chat");
      for (const input of box.querySelectorAll("[data-lw-box]")) if (document.activeElement !== input) input.value = model.get("values")[input.dataset.lwBox] ?? "";
      voices.fill();
    },
    // sent with the wish to run: a change of a trait may still be on its way, behind a busy kernel
    typed() {
      const values = { ...model.get("values") };
      for (const input of box.querySelectorAll("[data-lw-box]")) values[input.dataset.lwBox] = input.value;
      return { prompt: prompt.value, voice: voices.list.value, values, chat: chat.checked };
    },
    lock(running, voice) {
      run.setAttribute("aria-disabled", String(running));
      stop.setAttribute("aria-disabled", String(!running));
      voices.list.disabled = running;
      const reuse = box.querySelector('[data-lw-box="tgt_non_granular_index"]');
      reuse.disabled = voice.kind !== "mixture";
      reuse.placeholder = reuse.disabled ? "mixtures only" : "exact";
    },
  };
}

// one adapter's channel: name, level of the token that is looked at, fader, and a button that puts it to rest
function consoleChannel(view, i) {
  const { voice, mode } = view.desk, name = voice.adapters[i], [low, high] = view.desk.ranges[mode];
  const value = make("output", { class: "lw-fader-value", "aria-live": "off" }), number = make("span", { class: "lw-level-number", "data-lw-level": i }, "–");
  const fill = make("span", { class: "lw-level-fill", style: `background:${voice.colours[i]}` });
  const slider = make("input", { type: "range", min: low, max: high, step: mode === "bias" ? "0.1" : "0.01", "data-lw-fader": i,
    "aria-label": `${voice.keys[i]} ${name}, ${mode}`, disabled: view.desk.why !== "" });
  const rest = make("button", { type: "button", class: "lw-button lw-rest", "data-lw-rest": i, "aria-label": `Put ${name} to rest`, title: "to rest",
    disabled: view.desk.why !== "", onclick: () => view.fade(i, null) }, "↺");
  let sent = 0, timer = 0;
  slider.addEventListener("input", () => {
    show(Number(slider.value));
    clearTimeout(timer);
    timer = setTimeout(() => { [sent, timer] = [performance.now(), 0]; view.fade(i, Number(slider.value)); }, Math.max(0, 60 - (performance.now() - sent)));
  });
  const show = (at) => {
    const resting = at === null || (mode === "bias" && at === 0);
    value.textContent = resting ? "at rest" : mode === "bias" ? `${at < 0 ? "−" : "+"}${Math.abs(at).toFixed(1)}` : at.toFixed(2);
    slider.setAttribute("aria-valuetext", value.textContent);
    box.classList.toggle("lw-moved", !resting);
  };
  const box = make("div", { class: "lw-channel" },
    make("span", { class: "lw-name" }, swatch(voice.colours[i]), make("b", {}, voice.keys[i]), " ", make("bdi", {}, name)), value, rest,
    make("span", { class: "lw-level", "aria-hidden": "true" }, fill), number,
    make("span", { class: `lw-slot lw-slot-${mode}` }, slider));
  return {
    box,
    // what Python says of a fader that is on its way is older than where it stands
    set(at) { if (timer) return; if (at !== null || mode === "bias") slider.value = String(at ?? 0); show(at); },
    level(mean) {
      number.textContent = liveNumber(mean, 2);
      fill.style.width = `${100 * clamp(mean || 0, 0, 1)}%`;
      // a fader that forces nothing stands where the classifier has put the adapter
      if (mode === "force" && view.desk.values[i] == null && document.activeElement !== slider) slider.value = String(clamp(mean || 0, 0, 1));
    },
  };
}

function consoleDesk(view) {
  const { model, talk } = view, list = make("div", { class: "lw-channels" });
  const why = make("p", { class: "lw-why", "data-lw-why": true }), says = make("p", { class: "lw-why" });
  const group = `lw-mode-${talk.page}`;
  const modes = Object.keys(CONSOLE_MODES).map((mode) => make("input", { type: "radio", name: group, value: mode, "data-lw-mode": mode,
    onchange: () => { asked = mode; talk.send("mode", { mode }); } }));
  const all = make("button", { type: "button", class: "lw-button", "data-lw-rest-all": true, onclick: () => all.getAttribute("aria-disabled") === "true" || talk.send("clear") }, "All to rest");
  const box = make("section", { class: "lw-desk", "aria-label": "Faders" },
    make("div", { class: "lw-desk-head" }, make("div", { class: "lw-label" }, "Faders"),
      make("fieldset", { class: "lw-choice" }, make("legend", { class: "lw-sr" }, "Mode of the faders"), ...modes.map((input) => make("label", {}, input, make("span", {}, input.value)))), all),
    why, list, says);
  // asked: the mode that was chosen here, until Python has answered
  let channels = [], built = "", seq = 0, asked = null;
  view.fade = (adapter, value) => talk.send("fader", { adapter, value, mode: view.desk.mode, seq: ++seq });
  return {
    box,
    draw(voice, story, token) {
      const faders = model.get("faders"), mode = faders.mode ?? "bias", values = faders.values ?? [];
      const reason = voice.kind === "mixture" ? "" : `Faders move the adapters of a mixture; ${voice.label} has none to move.`;
      view.desk = { voice, mode, values, ranges: faders.ranges, why: reason };
      why.textContent = reason;
      why.hidden = !reason;
      says.textContent = CONSOLE_MODES[mode];
      says.hidden = Boolean(reason);
      // a disabled button would lose the focus of whoever has just pressed it
      all.setAttribute("aria-disabled", String(Boolean(reason) || values.every((value) => value == null)));
      modes.forEach((input) => { input.checked = input.value === (asked ?? mode); input.disabled = Boolean(reason); });
      const shape = JSON.stringify([voice.id, voice.adapters, mode]);
      if (shape !== built) {
        channels = voice.adapters.map((_, i) => consoleChannel(view, i));
        list.replaceChildren(...channels.map((channel) => channel.box));
        built = shape;
        this.pull(true);
      }
      const means = story?.voice.id === voice.id ? story.means[token] : undefined;
      channels.forEach((channel, i) => channel.level(means?.[i]));
    },
    // where Python says the faders stand; an older answer to this page's own move is not news
    pull(always) {
      asked = null;
      const { values = [], page, seq: answered } = model.get("faders");
      if (always || page !== talk.page || answered === seq) channels.forEach((channel, i) => channel.set(values[i] ?? null));
    },
  };
}

// everything that is seen, in its order
function consoleParts(view) {
  const { model, talk } = view, point = (token) => { view.pointed = token; view.draw(); };
  const after = make("p", { class: "lw-why", hidden: true }, "In Python now: .trace, .completion, .history, .explore(), .save(\"answer.html\").");
  const form = consoleForm(view), desk = consoleDesk(view), meters = liveMeters(), scale = liveScale();
  const text = liveText("The answer", point), strip = liveStrip("Scalings, mean over the sites", point);
  const root = make("div", { class: "lw lw-console", "data-lw-console": true, "data-lm-suppress-shortcuts": "true" }, consoleHead(model, talk), form.box, text.box,
    make("section", { class: "lw-tape", "aria-label": "Scalings" }, strip.box, scale.box, after),
    make("aside", { class: "lw-rack" }, desk.box, make("section", { class: "lw-counts", "aria-label": "Counters" }, meters.box)));
  return { root, after, form, desk, meters, scale, text, strip };
}

const CONSOLE_NOBODY = { kind: "base", label: "nobody", id: "", adapters: [], keys: [], colours: [] };

function consoleDraw(view, { root, after, form, desk, meters, text, strip }) {
  const { model, story, pointed } = view, token = pointed ?? (story ? story.means.length - 1 : -1);
  const chosen = () => model.get("voices").find((voice) => voice.id === form.voices.list.value) ?? CONSOLE_NOBODY;
  const voice = view.running() ? story.voice : chosen();
  root.dataset.lwState = !story ? "idle" : story.ended ? "ended" : "running";
  after.hidden = !story?.ended;
  form.lock(view.running(), voice);
  text.draw();
  text.point(pointed);
  strip.moved(story ? model.get("faders").moves ?? [] : []);
  strip.point(pointed);
  desk.draw(voice, story, token);
  meters.draw(story);
}

function consoleBegin(view, { text, strip }, content) {
  view.talk.greeted();
  const story = view.story = liveStory({ ...content, promptTokens: content.prompt_tokens });
  view.pointed = null;
  text.begin(story);
  strip.begin(story);
  view.says.fail("");
  view.says.say(`Reading the prompt: ${content.prompt_tokens + content.hidden} tokens …`);
}

function consoleEnd({ story, says }, { strip }, content) {
  Object.assign(story, { ended: content, stats: content.stats });
  says.say(content.reason === "error" ? "" : liveEnding(story));
  if (content.reason === "error") says.fail(liveEnding(story));
  strip.speak();
}

function consoleHears(view, parts, content, buffers) {
  const { story, says, talk } = view;
  if (!talk.hears(content)) return;
  if (content.type === "say") content.error ? says.fail(content.text) : says.say(content.text);
  else if (content.type === "start") consoleBegin(view, parts, content);
  else if (content.run !== story?.run) { if (content.type === "more" && !(story?.run > content.run)) talk.greet(); }
  else if (content.type === "more") {
    if (!liveTake(story, content, buffers)) return talk.greet();
    if (content.stats.generated && !story.wrote) { story.wrote = true; says.say("Writing …"); }
  } else if (content.type === "end") consoleEnd(view, parts, content);
  view.draw();
}

function consoleView(model, el) {
  const says = liveSays(), talk = liveTalkAloud(model, says.fail);
  const view = { model, talk, says, status: says.status, alert: says.alert, story: null, pointed: null };
  view.running = () => view.story !== null && !view.story.ended;
  view.draw = view.refresh = liveFrames(el, () => view.drawNow());
  view.run = () => {
    if (view.running()) return says.fail("It is answering already; stop it first.");
    says.fail("");
    talk.send("run", view.typed());
  };
  view.stop = () => { if (view.running()) talk.send("stop"); };
  return view;
}

function renderConsole({ model, el }) {
  const view = consoleView(model, el), { talk } = view, parts = consoleParts(view), { root, form, desk, strip, scale } = parts;
  view.typed = form.typed;
  view.drawNow = () => consoleDraw(view, parts);
  const pulled = () => { form.pull(); view.draw(); }, moved = () => { desk.pull(false); view.draw(); };
  const unlisten = liveListen(model, (content, buffers) => consoleHears(view, parts, content, buffers),
    { prompt: pulled, voice: pulled, values: pulled, chat: pulled, voices: pulled, faders: moved });
  const sizes = new ResizeObserver(() => strip.draw());
  sizes.observe(strip.box);
  el.replaceChildren(root);
  const untheme = followTheme(model, root, (theme) => { scale.theme(theme); strip.theme(theme); });
  view.drawNow();
  talk.greet();
  return () => {
    talk.end();
    unlisten();
    sizes.disconnect();
    untheme();
  };
}
