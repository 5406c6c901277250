// Last part of the one ES module, and its one export. Two hosts: anywidget gives its model, a static page a shim with the
// same methods (static_host.js). The model's `view` says which of the views that were joined here draws it.

const VIEWS = { __VIEWS__ };

function render({ model, el }) {
  el.classList.add("lw-host");
  const name = model.get("view") ?? "scalings";
  try {
    if (!Object.hasOwn(VIEWS, name)) throw new Error(`there is no view ${name}; there are ${Object.keys(VIEWS).join(", ")}`);
    return VIEWS[name]({ model, el });
  } catch (error) {
    showError(el, error);
  }
}

export default { render };
