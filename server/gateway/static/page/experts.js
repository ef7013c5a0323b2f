// Where the experts of a group are: their load, what each rank has of it, and how they moved.

import { HeatMap } from "./chart.js";
import { html } from "./vendor/htm-preact.js";

const STEP_PX = 44;
const HEIGHT_PX = 64;

export function Experts({ experts, theme }) {
  return html`<section class="card" aria-labelledby="experts"><h3 id="experts">Expert load, layers × experts</h3>
    ${experts
      ? html`<${HeatMap} tokens=${experts.tokens} theme=${theme} />
          ${experts.slots && html`<${Ranks} experts=${experts} /><${Plans} plans=${experts.plans} />
          <${Moves} moved=${experts.moved} numRanks=${experts.num_ranks} />`}`
      : html`<p class="empty">This engine does not count tokens per expert yet.</p>`}
  </section>`;
}

/** Return each rank's load over the mean of all, an expert's load being split among its replicas. */
function rankShares({ slots, tokens, num_ranks: numRanks }) {
  const loads = new Array(numRanks).fill(0);
  slots.forEach((row, layer) => {
    const replicas = new Map();
    row.forEach((expert) => replicas.set(expert, (replicas.get(expert) ?? 0) + 1));
    row.forEach((expert, slot) => {
      if (expert >= 0) loads[Math.floor((slot * numRanks) / row.length)] += tokens[layer][expert] / replicas.get(expert);
    });
  });
  const mean = loads.reduce((sum, load) => sum + load, 0) / numRanks;
  return loads.map((load) => (mean ? load / mean : 0));
}

function Ranks({ experts }) {
  const shares = rankShares(experts);
  const most = Math.max(1, ...shares);
  return html`<h4>Experts' load of each rank</h4>
    <ol class="bars ranks">${shares.map((share, rank) => html`<li key=${rank}><span>${rank}</span>
      <div class="track"><i class="bar c1" style=${{ width: `${(100 * share) / most}%` }}></i></div><b>${share.toFixed(2)}</b></li>`)}</ol>`;
}

function Plans({ plans }) {
  if (!plans.length) return null;
  const [step, before, after, changes] = plans.at(-1);
  const points = (place) => plans.map((plan, i) => `${(100 * i) / Math.max(1, plans.length - 1)},${30 - 30 * plan[place]}`).join(" ");
  return html`<h4>Balancedness, before and after each placement</h4>
    <svg class="balance" viewBox="0 -1 100 32" preserveAspectRatio="none" role="img" aria-label=${`balancedness of the last ${plans.length} placements`}>
      <polyline class="before" points=${points(1)} /><polyline class="after" points=${points(2)} /></svg>
    <p class="note">step ${step}: ${before.toFixed(2)} → ${after.toFixed(2)}, ${changes} slots to change</p>`;
}

/** Arrows between ranks; the wider, the more experts went that way. */
function Moves({ moved, numRanks }) {
  const counts = new Map();
  moved.forEach(([, , source, target]) => {
    if (source !== target) counts.set(`${source} → ${target}`, (counts.get(`${source} → ${target}`) ?? 0) + 1);
  });
  if (!counts.size) return null;
  const x = (rank) => (rank + 0.5) * STEP_PX;
  const arrows = [...counts].map(([name, count]) => {
    const [source, target] = name.split(" → ").map(Number);
    const top = HEIGHT_PX - 16 - Math.min(HEIGHT_PX, 14 * Math.abs(source - target)) - (source < target ? 8 : 0);
    return html`<path key=${name} class=${source < target ? "right" : "left"} stroke-width=${Math.min(6, 0.5 + count / 2)}
      marker-end="url(#head)" d=${`M ${x(source)} ${HEIGHT_PX - 16} Q ${(x(source) + x(target)) / 2} ${top} ${x(target)} ${HEIGHT_PX - 16}`}
      ><title>${`rank ${name}: ${count} experts`}</title></path>`;
  });
  const summary = `moves between ranks: ${[...counts].map(([name, count]) => `${name} (${count})`).join(", ")}`;
  return html`<h4>Moves since the last placement</h4>
    <svg class="moves" width=${numRanks * STEP_PX} height=${HEIGHT_PX} role="img" aria-label=${summary}>
      <defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" /></marker></defs>
      ${arrows}
      ${[...Array(numRanks).keys()].map((rank) => html`<text key=${rank} x=${x(rank)} y=${HEIGHT_PX - 3}>${rank}</text>`)}
    </svg>`;
}
