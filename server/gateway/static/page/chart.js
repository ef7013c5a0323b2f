// A line chart over time, and the heat map of experts.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT_PX = 150;

/** Return the computed value of a colour of the style sheet: a canvas knows no variables. */
function colour(name) {
  const probe = document.createElement("span");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** `series`: [{label, colour, values}], one value or null per time; `theme` redraws when it changes. */
export function Chart({ title, times, series, format, theme }) {
  const holder = useRef();
  const plot = useRef();
  const [index, setIndex] = useState(null);
  useLayoutEffect(() => {
    const width = () => Math.max(120, holder.current.clientWidth);
    plot.current = new uPlot(options(series, format, width(), setIndex), [[], ...series.map(() => [])], holder.current);
    const observer = new ResizeObserver(() => plot.current.setSize({ width: width(), height: HEIGHT_PX }));
    observer.observe(holder.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [theme]);
  useEffect(() => plot.current.setData([times, ...series.map((line) => line.values)]), [times, theme]);
  const shown = index ?? times.length - 1;
  return html`<figure class="card">
    <figcaption><h3>${title}</h3>
      <ul class="legend">${series.map((line) => html`<li key=${line.label}>
        <i class="swatch ${line.colour}"></i>${line.label} <b>${text(line.values[shown], format)}</b></li>`)}</ul>
    </figcaption>
    <div ref=${holder} class="plot"></div>
  </figure>`;
}

const text = (value, format) => (value == null ? "–" : format(value));

function options(series, format, width, onIndex) {
  const axis = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width,
    height: HEIGHT_PX,
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
    scales: { y: { range: (_, __, high) => [0, high > 0 ? high * 1.1 : 1] } },
    hooks: { setCursor: [(plot) => onIndex(plot.cursor.idx ?? null)] },
    series: [{}, ...series.map((line) => ({ label: line.label, stroke: colour(line.colour), width: 1.75, points: { show: false } }))],
    axes: [
      { ...axis, size: 24, space: 90, values: clock },
      { ...axis, size: 56, values: (_, ticks) => ticks.map((tick) => format(tick)) },
    ],
    padding: [6, 22, 0, 0],
  };
}

const clock = (_, ticks) => ticks.map((tick) => new Date(tick * 1000).toLocaleTimeString("en-GB"));

/** Layers down, experts across; the shade is the load relative to an even share. */
export function HeatMap({ tokens, theme }) {
  const canvas = useRef();
  const [cell, setCell] = useState(null);
  const numExperts = tokens[0].length;
  const shares = tokens.map((row) => {
    const mean = row.reduce((sum, count) => sum + count, 0) / numExperts;
    return row.map((count) => (mean ? count / mean : 0));
  });
  useEffect(() => draw(canvas.current, shares), [tokens, theme]);
  const onPointerMove = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const layer = Math.floor(((event.clientY - box.top) / box.height) * shares.length);
    const expert = Math.floor(((event.clientX - box.left) / box.width) * numExperts);
    if (shares[layer]?.[expert] !== undefined) setCell({ layer, expert });
  };
  const busiest = Math.max(...shares.flat());
  const summary = `${shares.length} layers, ${numExperts} experts each; the busiest expert gets ${busiest.toFixed(1)} times an even share`;
  const hover = cell && `layer ${cell.layer}, expert ${cell.expert}: ${shares[cell.layer][cell.expert].toFixed(2)} × an even share`;
  return html`<canvas class="heat" ref=${canvas} role="img" aria-label=${summary}
      onPointerMove=${onPointerMove} onPointerLeave=${() => setCell(null)}></canvas>
    <p class="note">${hover ?? summary}</p>`;
}

function draw(canvas, shares) {
  canvas.width = shares[0].length;
  canvas.height = shares.length;
  canvas.style.height = `${Math.min(420, Math.max(60, shares.length * 8))}px`;
  const pen = canvas.getContext("2d");
  pen.fillStyle = colour("accent");
  shares.forEach((row, layer) => row.forEach((share, expert) => {
    pen.globalAlpha = Math.min(1, 0.04 + share / 3); // three times an even share is full colour
    pen.fillRect(expert, layer, 1, 1);
  }));
}
