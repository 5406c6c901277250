// the other host of the views: a model that holds inlined state instead of a kernel's
const state = __STATE__;
for (const name of __BINARY__) {
  const text = atob(state[name]);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  state[name] = new DataView(bytes.buffer);
}
for (const el of document.querySelectorAll('[data-lw="__ID__"]:not([data-lw-ready])')) {
  const own = { ...state };
  const heard = {};
  const model = {
    get: (name) => own[name],
    set: (name, value) => { own[name] = value; for (const call of heard[`change:${name}`] ?? []) call(); },
    on: (event, call) => (heard[event] ??= new Set()).add(call),
    off: (event, call) => heard[event]?.delete(call),
    save_changes: () => {},
  };
  el.dataset.lwReady = "";
  render({ model, el });
}
