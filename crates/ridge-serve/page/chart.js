// Small charts as SVG: lines or dots.

const SPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [400, 130, 44, 6, 6, 18];

function node(tag, attributes, text) {
  const made = document.createElementNS(SPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Round numbers from 0 to at least `most`. */
export function ticks(most) {
  const top = most > 0 ? most : 1;
  const power = 10 ** Math.floor(Math.log10(top / 3));
  const step = [1, 2, 5, 10].map((s) => s * power).find((s) => top / s <= 4);
  return Array.from({ length: Math.ceil(top / step - 1e-9) + 1 }, (_, i) => i * step);
}

/**
 * The largest value that a chart shows in full: all but a few outliers, which would flatten the rest. Outliers are a tenth
 * of the values at most, and more than three times what the others reach.
 */
export function bulk(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const most = sorted.at(-1);
  const usual = sorted[Math.max(0, Math.ceil(0.9 * sorted.length) - 1)];
  return sorted.length >= 10 && most > 3 * usual ? usual * 1.2 : most;
}

/**
 * Draws into `place`: `series` are [{name, points: [[x, y]], dots}], from `x0` to `x1`, which `axis` describes. A chart
 * without points says `none`.
 */
export function draw(place, { series, x0, x1, axis, none }) {
  const points = series.flatMap((s) => s.points);
  if (points.length === 0) {
    const text = document.createElement("p");
    text.className = "none";
    text.textContent = none;
    place.replaceChildren(text);
    return;
  }
  const marks = ticks(bulk(points.map((p) => p[1])));
  const most = marks.at(-1);
  const x = (v) => LEFT + ((v - x0) / Math.max(x1 - x0, 1e-9)) * (WIDTH - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - (Math.min(v, most) / most) * (HEIGHT - TOP - BOTTOM);
  const last = series.filter((s) => s.points.length).map((s) => `${s.name} ${s.points.at(-1)[1].toFixed(2)}`);
  const chart = node("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `last: ${last.join(", ")}` });
  for (const mark of marks) {
    chart.append(node("line", { class: "gridline", x1: LEFT, x2: WIDTH - RIGHT, y1: y(mark), y2: y(mark) }));
    chart.append(node("text", { x: LEFT - 4, y: y(mark) + 4, "text-anchor": "end" }, Number(mark.toPrecision(6)).toString()));
  }
  chart.append(node("text", { x: LEFT, y: HEIGHT - 4 }, axis));
  const above = points.filter((p) => p[1] > most);
  let legend = WIDTH - RIGHT;
  series.forEach((s, i) => {
    if (s.dots) {
      for (const [a, b] of s.points) chart.append(node("circle", { class: `s${i}`, cx: x(a), cy: y(b), r: 2 }));
    } else {
      chart.append(node("polyline", { class: `s${i}`, points: s.points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
    }
    if (series.length > 1) {
      chart.append(node("text", { x: legend, y: HEIGHT - 4, "text-anchor": "end" }, s.name));
      legend -= 7 * s.name.length + 8;
      chart.append(node("circle", { class: `s${i}`, cx: legend, cy: HEIGHT - 8, r: 4 }));
      legend -= 14;
    }
  });
  for (const [a] of above) chart.append(node("path", { class: "beyond", d: `M${x(a) - 4} ${y(most) + 6}h8l-4 -6z` }));
  if (above.length) {
    const most = Number(Math.max(...above.map((p) => p[1])).toPrecision(3));
    chart.append(node("text", { x: WIDTH - RIGHT, y: TOP + 18, "text-anchor": "end" }, `${above.length} above, up to ${most}`));
  }
  place.replaceChildren(chart);
}
