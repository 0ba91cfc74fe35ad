// The live view of the server.

import { drawChart, niceTop } from "./chart.js";
import { fetchMetrics } from "./client.js";
import { byId } from "./dom.js";
import { History, SPAN } from "./metrics.js";

const INTERVAL = 2000;
const NOTHING = "–";

const history = new History();

/** Reads the metrics while the page is seen. */
export function startLive() {
  let timer;
  const poll = async () => {
    clearTimeout(timer);
    if (document.visibilityState === "hidden") {
      return;
    }
    await update();
    clearTimeout(timer);
    timer = setTimeout(poll, INTERVAL);
  };
  document.addEventListener("visibilitychange", poll);
  poll();
}

async function update() {
  try {
    const text = await fetchMetrics(AbortSignal.timeout(5 * INTERVAL));
    history.add(text, Date.now());
    setState("Connected", true);
  } catch {
    setState("Not connected", false);
  }
  draw(Date.now());
}

function setState(text, isConnected) {
  const state = byId("live-state");
  if (state.textContent !== text) {
    state.textContent = text;
  }
  state.classList.toggle("bad", !isConnected);
}

function draw(now) {
  const speed = history.speed();
  const [running, waiting] = [history.gauge("running"), history.gauge("waiting")];
  show("speed-value", speed, decimal);
  show("running-value", running, String);
  show("waiting-value", waiting, String);
  show("cache-value", history.gauge("cache"), percent);
  show("prefix-value", history.prefixShare(), percent);
  card("speed", [speed], ["tokens per second"], decimal, now);
  card("requests", [running, waiting], ["running", "waiting"], String, now);
  card("cache", [history.gauge("cache")], ["in use"], percent, now, 1);
  card("prefix", [history.prefixShare()], ["of prompt tokens were cached"], percent, now, 1);
}

function show(id, points, format) {
  const value = points.at(-1)?.value ?? null;
  byId(id).textContent = value === null ? NOTHING : format(value);
}

/** Draws a chart, and says what it shows to readers of screens. */
function card(id, lines, names, format, now, fixedTop) {
  const seen = lines.map((points) =>
    points.filter((point) => point.value !== null && point.time >= now - SPAN),
  );
  const most = (points) => Math.max(...points.map((point) => point.value));
  const top = fixedTop ?? niceTop(Math.max(0, ...seen.map(most)));
  const svg = byId(`${id}-chart`);
  drawChart(svg, lines, { now, span: SPAN, top });
  byId(`${id}-top`).textContent = format(top);
  const texts = seen.map((points, index) => {
    if (points.length === 0) {
      return `no value of ${names[index]}`;
    }
    const last = points.at(-1).value;
    return `${format(last)} ${names[index]}, at most ${format(most(points))}`;
  });
  svg.setAttribute("aria-label", `The last 5 minutes: ${texts.join("; ")}.`);
}

function decimal(value) {
  return value < 10 ? String(Math.round(10 * value) / 10) : String(Math.round(value));
}

function percent(value) {
  return `${decimal(100 * value)} %`;
}
