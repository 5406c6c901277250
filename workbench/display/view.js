// Last part of the one ES module, and its one export. Two hosts: anywidget gives its model, a static page a shim with the
// same methods (static_host.js). The model's `view` says which of the views that were joined here draws it.

const VIEWS = { __VIEWS__ };

const GONE = "The kernel of this view has stopped, was restarted or is out of reach. What is shown stays; if it does not "
  + "come back by itself, run the cell again.";

// Jupyter's widget manager tells a model when its kernel goes; a word from the kernel says that it is back.
function tellWhenGone(model, el) {
  const notice = make("p", { class: "lw-gone", role: "status", "data-lw-gone": true }, GONE);
  const tell = () => el.prepend(notice), back = () => notice.remove();
  model.on("comm_live_update", tell);
  model.on("msg:custom", back);
  return () => { model.off("comm_live_update", tell); model.off("msg:custom", back); };
}

function render({ model, el }) {
  el.classList.add("lw-host");
  const name = model.get("view") ?? "scalings";
  try {
    if (!Object.hasOwn(VIEWS, name)) throw new Error(`there is no view ${name}; there are ${Object.keys(VIEWS).join(", ")}`);
    const leave = VIEWS[name]({ model, el }), forget = tellWhenGone(model, el);
    return () => { forget(); leave?.(); };
  } catch (error) {
    showError(el, error);
  }
}

export default { render };
