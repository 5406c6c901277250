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

function swatch(colour) {
  return make("span", { class: "lw-swatch", style: `background:${colour}`, "aria-hidden": "true" });
}

// a Bytes trait as bytes of its own: typed arrays need an aligned start
function bytesOf(model, name) {
  const view = model.get(name);
  return new Uint8Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
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
  const observer = new MutationObserver(repaint);
  observer.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-vscode-theme-kind"] });
  const preference = matchMedia("(prefers-color-scheme: dark)");
  preference.addEventListener("change", repaint);
  model.on("change:theme", repaint);
  repaint();
  return () => {
    observer.disconnect();
    preference.removeEventListener("change", repaint);
    model.off("change:theme", repaint);
  };
}
