// First part of the one ES module (`page.module` joins the parts): what every view uses. Text from a trace, a run or a
// request is only ever set as text content.

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const blend = (below, above, part) => below.map((channel, i) => Math.round(channel + (above[i] - channel) * part));
const percent = (share) => (share == null ? "–" : `${Math.round(share * 100)} %`);
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function isDark(model) {
  const wanted = model.get("theme");
  if (wanted === "dark" || wanted === "light") return wanted === "dark";
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight) return jpThemeLight === "false";
  if (vscodeThemeKind) return vscodeThemeKind.includes("dark");
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

// a bar as long as a share from 0 to 1; nothing where there is no share
function shareBar(share, colour) {
  return share == null || Number.isNaN(share) ? "" : make("span", { class: "lw-bar", style: `width:${100 * clamp(share, 0, 1)}%;background:${colour}` });
}

function swatch(colour) {
  return make("span", { class: "lw-swatch", style: `background:${colour}`, "aria-hidden": "true" });
}

const NO_VALUE = -2; // in the place of a source, as in payload.py

function statusOf(data, token) {
  const parts = [data.generated[token] ? "generated" : "prompt"];
  const source = data.source[token];
  if (source === NO_VALUE) parts.push("no value: none of its scalings is a number");
  else if (source < 0) parts.push("no scalings: never an input");
  else if (source === data.positions[token]) parts.push("scalings computed");
  else parts.push(`scalings reused from position ${source}`);
  if (data.draft[token] >= 0) parts.push(data.draft[token] ? "draft accepted" : "draft rejected");
  if (data.time_s[token] > 0) parts.push(`after ${data.time_s[token].toFixed(2)} s`);
  return parts.join(" · ");
}

function header(data) {
  const facts = make("div", { class: "lw-facts" });
  for (const [name, value] of data.facts) if (name !== "Edited run") facts.append(make("span", {}, make("span", { class: "lw-fact" }, name), " ", make("bdi", {}, value)));
  const edits = data.edits?.length ? make("div", { class: "lw-edited" }, make("b", {}, "✎ Edited run: "), make("bdi", {}, data.edits.join("; "))) : "";
  return make("div", { class: "lw-head" }, make("div", { class: "lw-title", role: "heading", "aria-level": "2" }, data.title), facts, edits);
}

function choice(view, label, name, options) {
  const select = (value) => { view[name] = value; view.model.set(name, value); view.model.save_changes(); view.draw(); };
  if (options.length > 10) {
    const list = make("select", { "aria-label": label, onchange: (event) => select(options[event.target.selectedIndex].value) },
      ...options.map(({ value, text }) => make("option", { selected: view[name] === value }, text)));
    return make("label", { class: "lw-choice" }, label, " ", list);
  }
  const group = `lw-${name}-${Math.random().toString(36).slice(2)}`;
  return make("fieldset", { class: "lw-choice" }, make("legend", {}, label), ...options.map(({ value, text, colour }) => make("label", {},
    make("input", { type: "radio", name: group, checked: view[name] === value, onchange: () => select(value) }),
    make("span", {}, colour ? swatch(colour) : "", make("bdi", {}, text)))));
}

// a Bytes trait as bytes of its own: typed arrays need an aligned start
function bytesOf(model, name) {
  const view = model.get(name);
  return new Uint8Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

// redo() makes controls of `root` anew: the one that had the focus, known by its words, has it again
function keepingFocus(root, redo) {
  const words = (node) => `${node.tagName} ${node.getAttribute("aria-label") ?? node.closest("label")?.textContent ?? node.textContent}`;
  const held = root.contains(document.activeElement) ? words(document.activeElement) : null;
  redo();
  if (held === null || root.contains(document.activeElement)) return;
  [...root.querySelectorAll("input, select, button, summary, [tabindex]")].find((node) => words(node) === held)?.focus({ preventScroll: true });
}

// an error is shown in the cell, once, below whatever was drawn before
function showError(el, error) {
  const said = `This view could not be drawn (${error.message ?? error}). The values are still there in Python; a figure can be saved as PNG.`;
  if (!el.querySelector(".lw-error")) el.append(make("pre", { class: "lw-error", role: "alert" }, said));
}

// Give `root` the colours of the theme that holds (the model's `theme`, Jupyter's, VS Code's, the system's) as --lw-…,
// call paint(theme) now and at every change, and return what ends it. The model's `themes` is palette.themes().
function followTheme(model, root, paint) {
  const repaint = () => {
    const name = isDark(model) ? "dark" : "light", theme = model.get("themes")[name];
    root.dataset.theme = name;
    root.style.colorScheme = name;
    for (const [key, value] of Object.entries(theme)) if (!Array.isArray(value)) root.style.setProperty(`--lw-${key}`, value);
    paint(theme);
  };
  // Jupyter hides its page while it changes the theme, and shows it again before a ResizeObserver looks: what was painted
  // in between was painted without a width
  let later = 0;
  const settle = (tries) => { later = setTimeout(() => (root.clientWidth ? repaint() : tries && settle(tries - 1)), 150); };
  const observer = new MutationObserver(() => { repaint(); clearTimeout(later); settle(20); });
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  const preference = matchMedia("(prefers-color-scheme: dark)");
  preference.addEventListener("change", repaint);
  model.on("change:theme", repaint);
  repaint();
  return () => {
    clearTimeout(later);
    observer.disconnect();
    preference.removeEventListener("change", repaint);
    model.off("change:theme", repaint);
  };
}

// A box that may be taller than its room, with a line at its lower edge that says so while there is more below.
function scrollable(box) {
  const more = make("div", { class: "lw-more", "aria-hidden": "true", hidden: true }, "scroll for more ↓");
  const look = () => { more.hidden = box.scrollHeight - box.scrollTop - box.clientHeight < 8; };
  box.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(box);
  new MutationObserver(look).observe(box, { childList: true, subtree: true, characterData: true });
  return make("div", { class: "lw-scrollable" }, box, more);
}
