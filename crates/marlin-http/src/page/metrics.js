// The figures of the server, from the text of `/metrics`, and their last minutes.

/** How far back the charts go, in milliseconds. */
export const SPAN = 5 * 60_000;
/** The time over which the prefix cache's share is taken, in milliseconds. */
const PREFIX_SPAN = 60_000;
/** Between samples further apart than this, in milliseconds, a line has a gap. */
const MAX_GAP = 10_000;

const NAMES = {
  tokens: "vllm:generation_tokens_total",
  running: "vllm:num_requests_running",
  waiting: "vllm:num_requests_waiting",
  cache: "vllm:kv_cache_usage_perc",
  queries: "vllm:prefix_cache_queries_total",
  hits: "vllm:prefix_cache_hits_total",
};

/** Returns the values of a text of Prometheus or OpenMetrics, summed over their labels. */
export function parseMetrics(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)/.exec(line);
    const value = Number(match?.[2]);
    if (match && Number.isFinite(value)) {
      values.set(match[1], (values.get(match[1]) ?? 0) + value);
    }
  }
  return values;
}

/** The samples of the last minutes. */
export class History {
  constructor() {
    this.samples = [];
  }

  /** Adds the metrics at a time in milliseconds. */
  add(text, time) {
    const values = parseMetrics(text);
    const sample = { time };
    for (const [field, name] of Object.entries(NAMES)) {
      sample[field] = values.get(name) ?? 0;
    }
    const last = this.samples.at(-1);
    if (last && (sample.tokens < last.tokens || sample.queries < last.queries)) {
      // The server was started again.
      this.samples = [];
    }
    this.samples.push(sample);
    this.samples = this.samples.filter((kept) => time - kept.time <= SPAN + PREFIX_SPAN);
  }

  /** Returns the points of a gauge. */
  gauge(field) {
    return this.#points((sample) => sample[field]);
  }

  /** Returns the points of generated tokens per second. */
  speed() {
    return this.#points((sample, last) =>
      last ? (1000 * (sample.tokens - last.tokens)) / (sample.time - last.time) : null,
    );
  }

  /** Returns the points of the share of the prompts' tokens that were in the prefix cache. */
  prefixShare() {
    let first = 0;
    return this.#points((sample) => {
      while (sample.time - this.samples[first].time > PREFIX_SPAN) {
        first += 1;
      }
      const queries = sample.queries - this.samples[first].queries;
      return queries > 0 ? (sample.hits - this.samples[first].hits) / queries : null;
    });
  }

  /** Returns a point for each sample; a value of null is a gap. */
  #points(valueOf) {
    const points = [];
    let last;
    for (const sample of this.samples) {
      const isGap = last && sample.time - last.time > MAX_GAP;
      if (isGap) {
        points.push({ time: sample.time, value: null });
        last = undefined;
      }
      points.push({ time: sample.time, value: valueOf(sample, last) });
      last = sample;
    }
    return points;
  }
}
