// Small charts of lines over time.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 56;

/**
 * Draws lines in an SVG element, from `now - span` to `now` and from 0 to `top`.
 *
 * Each line is a list of points with a time and a value; null is a gap.
 */
export function drawChart(svg, lines, { now, span, top }) {
  const x = (time) => (WIDTH * (1 - (now - time) / span)).toFixed(1);
  const y = (value) => (HEIGHT - 2 - (HEIGHT - 4) * Math.min(value / top, 1)).toFixed(1);
  const paths = [node("path", { class: "grid", d: `M0 ${HEIGHT - 1}H${WIDTH}M0 1H${WIDTH}` })];
  lines.forEach((line, index) => {
    for (const run of runs(line.filter((point) => point.time >= now - span))) {
      // A point alone is a line of no length, whose round ends are seen.
      const ends = run.length === 1 ? [...run, ...run] : run;
      const d = `M${ends.map((point) => `${x(point.time)} ${y(point.value)}`).join("L")}`;
      if (index === 0) {
        const end = `L${x(run.at(-1).time)} ${HEIGHT}L${x(run[0].time)} ${HEIGHT}Z`;
        paths.push(node("path", { class: "area", d: d + end }));
      }
      paths.push(node("path", { class: index === 0 ? "line" : "line second", d }));
    }
  });
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.replaceChildren(...paths);
}

/** Returns the next number of the form 1, 2 or 5 times a power of ten. */
export function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((top) => top >= value);
}

/** Divides a line at its gaps. */
function runs(points) {
  const result = [[]];
  for (const point of points) {
    if (point.value === null) {
      result.push([]);
    } else {
      result.at(-1).push(point);
    }
  }
  return result.filter((run) => run.length > 0);
}

function node(name, attributes) {
  const element = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) {
    element.setAttribute(key, value);
  }
  return element;
}
