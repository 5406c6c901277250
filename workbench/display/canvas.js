// What every canvas uses: hatches, and text that is set or cut to fit.

// slanted lines say "no value", upright ones "reused"
function hatch(context, colour, upright = false) {
  const tile = make("canvas", { width: 6, height: 6 }), brush = tile.getContext("2d");
  Object.assign(brush, { strokeStyle: colour, lineWidth: 1 });
  brush.stroke(new Path2D(upright ? "M1.5 0V6M4.5 0V6" : "M-1 1L1 -1M-1 7L7 -1M5 7L7 5"));
  return context.createPattern(tile, "repeat");
}

function write(context, text, x, y, style = {}) {
  Object.assign(context, { textAlign: "left", textBaseline: "middle", font: "11px system-ui, sans-serif" }, style);
  context.fillText(text, x, y);
}

function fitted(context, text, room) {
  context.font = "11px system-ui, sans-serif";
  if (context.measureText(text).width <= room) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > room) length--;
  return `${text.slice(0, length)}…`;
}
