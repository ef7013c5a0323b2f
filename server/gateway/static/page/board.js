// The live board: what /cluster says, as numbers and lines over the last minutes.

import { Chart } from "./chart.js";
import { Experts } from "./experts.js";
import { latencies, rates } from "./poll.js";
import { html, useMemo } from "./vendor/htm-preact.js";

const whole = (value) => Math.round(value).toLocaleString("en");
const rate = (value) => (value > 0 && value < 10 ? value.toFixed(1) : whole(value));
const percent = (value) => `${(value * 100).toFixed(value < 0.1 ? 1 : 0)}%`;
const bytes = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(1)} GB` : `${(value / 1e6).toFixed(1)} MB`);
const count = (value) => (Number.isInteger(value) ? whole(value) : ""); // no tick at half a request
const ms = (value) => (value >= 1000 ? `${(value / 1000).toFixed(1)} s` : `${value === 0 || value >= 10 ? whole(value) : value.toFixed(1)} ms`);
const orDash = (value, format) => (value == null ? "–" : format(value));

export function Board({ samples, theme, failure }) {
  const now = samples.at(-1);
  const lines = useMemo(() => now && series(samples), [now]);
  if (!now) {
    return html`<main class="board" tabindex="0"><p class="empty" role="status">${failure ?? "Waiting for the first numbers …"}</p></main>`;
  }
  const { engine, stats } = now;
  const chart = (title, format, ...parts) => html`<${Chart} title=${title} times=${lines.times} format=${format} theme=${theme}
    series=${parts.map(([label, colour, values]) => ({ label, colour, values }))} />`;
  return html`<main class="board" tabindex="0" aria-label="Live board"><div class="wide">
    <h1 class="hidden">Live board</h1>
    ${(engine.failure || failure) && html`<p class="error" role="alert">${engine.failure ?? failure}</p>`}
    <dl class="tiles">
      <${Tile} name="Generation" value=${orDash(lines.generation.at(-1), rate)} unit="tok/s" />
      <${Tile} name="First token" value=${orDash(lines.first50.at(-1), ms)} unit="median, 15 s" />
      <${Tile} name="Between tokens" value=${orDash(lines.inter50.at(-1), ms)} unit="median, 15 s" />
      <${Tile} name="Running" value=${whole(stats.num_running)} unit=${`of ${engine.max_num_seqs} sequences`} />
      <${Tile} name="Waiting" value=${whole(stats.num_waiting)} unit="requests" />
      <${Tile} name="Prefix hits" value=${orDash(hitRate(stats), percent)} unit="of prompt tokens" />
    </dl>
    <div class="charts">
      ${chart("Throughput, tokens per second", rate, ["prompt", "c2", lines.prompt], ["generation", "c1", lines.generation])}
      ${chart("Time to first token", ms, ["median", "c1", lines.first50], ["95%", "c3", lines.first95])}
      ${chart("Between two tokens", ms, ["median", "c1", lines.inter50], ["95%", "c3", lines.inter95])}
      ${chart("Requests", count, ["running", "c1", lines.running], ["waiting", "c3", lines.waiting])}
      <${Blocks} stats=${stats} />
      <${Speculation} speculation=${now.speculation} />
      <${Ranks} ranks=${now.ranks} />
      <${Facts} now=${now} />
    </div>
    <${Experts} experts=${now.experts} theme=${theme} />
  </div></main>`;
}

function series(samples) {
  return {
    times: samples.map((sample) => sample.at),
    prompt: rates(samples, ({ stats }) => stats.prompt_tokens),
    generation: rates(samples, ({ stats }) => stats.generation_tokens),
    first50: latencies(samples, "time_to_first_token", 0.5),
    first95: latencies(samples, "time_to_first_token", 0.95),
    inter50: latencies(samples, "inter_token", 0.5),
    inter95: latencies(samples, "inter_token", 0.95),
    running: samples.map(({ stats }) => stats.num_running),
    waiting: samples.map(({ stats }) => stats.num_waiting),
  };
}

function hitRate(stats) {
  const asked = stats.prefix_cache_queries_tokens;
  return asked ? stats.prefix_cache_hits_tokens / asked : null;
}

function Tile({ name, value, unit }) {
  return html`<div class="tile"><dt>${name}</dt><dd><b>${value}</b><span>${unit}</span></dd></div>`;
}

function Bar({ share, colour }) {
  return html`<i class="bar ${colour}" style=${{ width: `${Math.min(100, share * 100)}%` }}></i>`;
}

function Blocks({ stats }) {
  const parts = [
    ["owned by requests", "c1", stats.num_owned_blocks],
    ["cached for reuse", "c2", stats.num_cached_blocks],
    ["free", "c0", stats.num_free_blocks],
  ];
  return html`<section class="card" aria-labelledby="blocks"><h3 id="blocks">KV blocks, ${whole(stats.num_blocks)} in all</h3>
    <div class="stack" aria-hidden="true">${parts.map(([name, colour, blocks]) => html`<${Bar} key=${name} colour=${colour} share=${blocks / (stats.num_blocks || 1)} />`)}</div>
    <ul class="legend tall">${parts.map(([name, colour, blocks]) => html`<li key=${name}><i class="swatch ${colour}"></i>${name + " "}<b>${whole(blocks)}</b></li>`)}</ul>
    <p class="note">${whole(stats.num_preemptions)} preemptions · ${whole(stats.prefix_cache_hits_tokens)} prompt tokens reused</p>
  </section>`;
}

function Speculation({ speculation }) {
  const positions = speculation?.accepted_by_position ?? [];
  return html`<section class="card" aria-labelledby="drafts"><h3 id="drafts">Drafts accepted, by position</h3>
    ${speculation
      ? html`<ol class="bars">${positions.map((accepted, i) => html`<li key=${i}><span>${i + 1}</span>
          <div class="track"><${Bar} colour="c1" share=${accepted / speculation.num_drafts} /></div>
          <b>${percent(accepted / speculation.num_drafts)}</b></li>`)}</ol>
          <p class="note">${whole(speculation.num_drafts)} drafts · ${(1 + positions.reduce((a, b) => a + b, 0) / speculation.num_drafts).toFixed(2)} tokens a step</p>`
      : html`<p class="empty">No drafts so far: speculation is off or idle.</p>`}
  </section>`;
}

function Ranks({ ranks }) {
  return html`<section class="card" aria-labelledby="ranks"><h3 id="ranks">Load of each rank</h3>
    <div class="scroll" tabindex="0" role="region" aria-labelledby="ranks"><table>
      <thead><tr><th scope="col">rank</th><th scope="col">running</th><th scope="col">waiting</th><th scope="col">blocks in use</th><th scope="col">tokens</th></tr></thead>
      <tbody>${ranks.map((rank) => html`<tr key=${rank.rank}>
        <th scope="row">${rank.rank}</th><td>${rank.num_running}</td><td>${rank.num_waiting}</td>
        <td><div class="level"><div class="track"><${Bar} colour="c1" share=${rank.num_owned_blocks / (rank.num_blocks || 1)} /></div>
          ${percent(rank.num_owned_blocks / (rank.num_blocks || 1))}</div></td>
        <td>${whole(rank.prompt_tokens + rank.generation_tokens)}</td></tr>`)}</tbody>
    </table></div>
  </section>`;
}

function Facts({ now }) {
  const { engine } = now;
  const ended = Object.entries({ ...now.finished, ...now.errors }).map(([name, value]) => `${name} ${whole(value)}`);
  const facts = [
    ["Model", `${now.models.join(", ")} (${engine.model_type}, ${engine.dtype})`],
    ["Kernels", engine.kernels],
    ["Context", `${whole(engine.max_model_len)} tokens`],
    ["Weights", bytes(engine.weights_bytes)],
    ["KV cache", `${whole(engine.num_blocks * engine.block_tokens)} tokens, ${bytes(engine.num_blocks * engine.block_tokens * engine.kv_bytes_per_token)}`],
    ["Answers", ended.join(", ") || "none yet"],
    ["Server", `whalepod ${now.version}`],
  ];
  return html`<section class="card" aria-labelledby="facts"><h3 id="facts">Model and engine</h3>
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </section>`;
}
