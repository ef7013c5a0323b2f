// Reads /cluster once a second while the tab is visible, and turns the samples into series.

import { request } from "./api.js";

const PERIOD_MS = 1000;
const MAX_NUM_SAMPLES = 600;
const LATENCY_WINDOW_S = 15;

/** Poll until the returned function is called. `onSample` gets all samples kept so far, oldest first. */
export function poll(key, onSample, onFailure) {
  const samples = [];
  let timer = 0;
  let isEnded = false;
  async function tick() {
    try {
      const response = await request("cluster", key, { signal: AbortSignal.timeout(10 * PERIOD_MS) });
      const sample = { ...(await response.json()), at: Date.now() / 1000 };
      if (samples.length && sample.time_s < samples.at(-1).time_s) samples.length = 0; // a new server
      samples.push(sample);
      if (samples.length > MAX_NUM_SAMPLES) samples.shift();
      if (!isEnded) onSample(samples);
    } catch (error) {
      if (!isEnded) onFailure(error);
      if (error.status === 401) return; // only another key can help
    }
    schedule();
  }
  function schedule() {
    clearTimeout(timer);
    if (!isEnded && !document.hidden) timer = setTimeout(tick, PERIOD_MS);
  }
  document.addEventListener("visibilitychange", schedule);
  tick();
  return () => {
    isEnded = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", schedule);
  };
}

/** Return the change of a counter per second between neighbouring samples; null for the first. */
export function rates(samples, counter) {
  return samples.map((sample, i) => {
    const before = samples[i - 1];
    if (!before) return null;
    return Math.max(0, counter(sample) - counter(before)) / (sample.time_s - before.time_s);
  });
}

/** Return a quantile of a latency in milliseconds over the last seconds before each sample. */
export function latencies(samples, name, quantile) {
  let start = 0;
  return samples.map((sample) => {
    while (sample.time_s - samples[start].time_s > LATENCY_WINDOW_S) start += 1;
    const seconds = quantileBetween(samples[start].latency_s[name], sample.latency_s[name], quantile);
    return seconds === null ? null : seconds * 1000;
  });
}

/** Interpolate a quantile of what was observed between two readings of a histogram. */
export function quantileBetween(before, after, quantile) {
  const counts = after.counts.map((count, i) => count - before.counts[i]);
  const total = counts.at(-1);
  if (total <= 0) return null;
  const wanted = quantile * total;
  const i = counts.findIndex((count) => count >= wanted);
  const [low, high] = [after.bounds_s[i - 1] ?? 0, after.bounds_s[i]];
  if (high === null) return low; // beyond the last bound
  const below = counts[i - 1] ?? 0;
  return low + ((high - low) * (wanted - below)) / (counts[i] - below || 1);
}
