// Curves of the ticked runs: what the server has reduced to one point a pixel, smoothed, zoomed, averaged over seeds.

import { $, colorOf, duration, get, h, moveTo, number, place, put, select, state } from "./common.js";
import { groupBySeed } from "./runs.js";

const CHARTS = [
  {
    title: "Reward",
    keys: ["reward", "eval_reward"],
    names: ["training", "held out"],
    hint: "mean of each step; points are evaluations",
  },
  { title: "Loss", keys: ["loss"], hint: "of the policy objective" },
  { title: "Entropy", keys: ["entropy"], hint: "nats per token; a fall to 0 ends exploration" },
  {
    title: "KL",
    keys: ["kl", "reference_kl", "teacher_kl"],
    names: ["to the sampler", "to the reference", "to the teacher"],
    hint: "nats per token",
  },
  {
    title: "Staleness",
    keys: ["staleness_mean", "staleness_max"],
    names: ["mean", "max"],
    hint: "versions between sampling and training",
  },
  { title: "Tokens per second", keys: ["tokens_per_second"], hint: "sampled" },
  {
    title: "Lengths",
    keys: ["drawn_tokens_mean", "trained_tokens_mean"],
    names: ["sampled", "trained"],
    hint: "tokens per episode",
  },
  { title: "Seconds per step", keys: ["rollout_seconds", "train_seconds"], names: ["rollout", "training"], hint: "" },
  {
    title: "Groups without signal",
    keys: ["zero_variance_groups", "groups"],
    names: ["equal rewards", "all"],
    hint: "equal rewards teach nothing",
  },
  {
    title: "Failed episodes",
    keys: ["failed_episodes", "truncated_turns"],
    names: ["failed", "cut answers"],
    hint: "",
  },
  {
    title: "Gap of engine and trainer",
    keys: ["behaviour_gap_mean", "behaviour_gap_max"],
    names: ["mean", "max"],
    hint: "nats per token, before the update",
  },
  { title: "Gradient norm", keys: ["grad_norm"], hint: "" },
];
const KEYS = CHARTS.flatMap((chart) => chart.keys);
const DASHES = [[], [6, 4], [2, 3]];
const HEIGHT = 180,
  MIN_WIDTH = 300,
  FONT = "11px system-ui";
const MAX_NAMED = 8, // lines that a legend names
  FEW_POINTS = 40; // points that are drawn as such
const axisOf = () => place.axis ?? "step";
const AXES = { step: "step", time: "time", tokens: "tokens" };
const DECIMAL = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9].flatMap((zeros) => [1, 2, 5].map((digit) => digit * 10 ** zeros));
const TICKS = {
  step: DECIMAL,
  tokens: DECIMAL,
  time: [1, 5, 10, 30, 60, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800],
};
let charts = [],
  zoom = null,
  found = null,
  newest = 0;

const formatX = (value) =>
  value === null || value === undefined
    ? "–"
    : place.axis === "time"
      ? duration(value)
      : Intl.NumberFormat("en", { notation: value < 10_000 ? "standard" : "compact", maximumFractionDigits: 1 }).format(
          value,
        );

/** Read the curves of the ticked runs and draw them. An update keeps the charts, unless others are needed. */
export async function showCurves(isUpdate) {
  const runs = state.runs.map((run) => run.name).filter((name) => state.ticked.has(name)),
    request = ++newest;
  if (!isUpdate || !$("charts")) put($("view"), drawBar(), h("div", { id: "charts", class: "charts" }));
  if (!runs.length) return put($("charts"), h("p", { class: "empty" }, "Tick a run to see its curves."));
  const points = Math.min(innerWidth, 480);
  const answer = await get("curves", {
    run: runs,
    key: KEYS,
    axis: place.axis,
    points,
    low: zoom?.[0],
    high: zoom?.[1],
  });
  if (request !== newest) return; // a later one has been asked for
  found = answer;
  draw(isUpdate);
}

function drawBar() {
  const smoothing = h("input", {
    type: "range",
    min: 0,
    max: 0.99,
    step: 0.01,
    value: place.smooth ?? 0,
    "aria-label": "smoothing",
    oninput: (event) => {
      moveTo({ smooth: Number(event.target.value) || null });
      draw(true);
    },
  });
  const log = h("input", {
    type: "checkbox",
    onchange: (event) => {
      moveTo({ log: event.target.checked ? 1 : null });
      draw(false);
    },
  });
  log.checked = Boolean(place.log);
  return h(
    "div",
    { class: "bar" },
    h(
      "label",
      {},
      "over ",
      select("horizontal axis", axisOf(), Object.entries(AXES), (event) => {
        zoom = null;
        moveTo({ axis: event.target.value });
        showCurves();
      }),
    ),
    h("label", {}, "smoothing ", smoothing),
    h("label", {}, log, " log scale"),
    h("button", { type: "button", id: "reset-zoom", hidden: true, onclick: () => zoomTo(null) }, "Reset zoom"),
    h("span", { class: "facts" }, "Drag over a chart to zoom."),
    h("span", { class: "space" }),
    h("button", { type: "button", onclick: saveNumbers }, "CSV"),
  );
}

function saveNumbers() {
  const runs = [...state.ticked].map((name) => ["run", name]);
  h("a", { href: `/api/metrics.csv?${new URLSearchParams(runs)}`, download: "metrics.csv" }).click();
}

function zoomTo(range) {
  zoom = range;
  $("reset-zoom").hidden = range === null;
  showCurves(true);
}

/** Lines of a chart: a run or a group of seeds, one key, its values on the common grid, and their extent. */
function linesOf(chart) {
  const names = Object.keys(found.curves);
  const groups = place.seeds ? groupBySeed(names) : names.map((name) => ({ label: name, members: [name] }));
  return groups.flatMap(({ label, members }) =>
    chart.keys.flatMap((key, index) => {
      const curves = members.map((name) => found.curves[name]?.[key]).filter(Boolean);
      if (!curves.length) return [];
      const name =
        [groups.length > 1 || members.length > 1 ? label : "", chart.names?.[index] ?? ""].filter(Boolean).join(" ") ||
        chart.title.toLowerCase();
      const line = { name, color: colorOf(members[0]), dash: DASHES[index % 3], isSparse: key.startsWith("eval") };
      if (members.length > 1) return [{ ...line, ...average(curves.map((curve) => curve.mean)) }];
      return [{ ...line, mean: curves[0].mean, low: curves[0].low, high: curves[0].high }];
    }),
  );
}

/** Fill gaps between points of a run, so that runs with points at other positions can be averaged. */
function interpolate(values) {
  const filled = [...values];
  let last = -1;
  values.forEach((value, index) => {
    if (value === null) return;
    for (let gap = last + 1; last >= 0 && gap < index; gap++)
      filled[gap] = values[last] + ((value - values[last]) * (gap - last)) / (index - last);
    last = index;
  });
  return filled;
}

/** The mean of curves and their extent, at the positions where one of them has a point. */
function average(curves) {
  const filled = curves.map(interpolate);
  const at = found.x.map((_, index) =>
    curves.every((curve) => curve[index] === null)
      ? []
      : filled.map((curve) => curve[index]).filter((value) => value !== null),
  );
  const over = (reduce) => at.map((values) => (values.length ? reduce(values) : null));
  return {
    mean: over((values) => values.reduce((sum, value) => sum + value, 0) / values.length),
    low: over((values) => Math.min(...values)),
    high: over((values) => Math.max(...values)),
  };
}

/** An exponential moving average without bias towards its beginning. */
function smooth(values, weight) {
  let sum = 0,
    share = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + (1 - weight) * value;
    share = share * weight + (1 - weight);
    return sum / share;
  });
}

function draw(isUpdate) {
  if (!found) return;
  const logged = new Set(
    Object.values(found.curves)
      .flatMap((run) => Object.keys(run))
      .filter((key) => key.includes("/")),
  );
  const wanted = [
    ...CHARTS,
    ...[...logged]
      .sort()
      .map((key) => ({ title: key, keys: [key], hint: "logged by agents, sources or custom metrics" })),
  ];
  // Of many runs, two lines for each would be twice as many to tell apart.
  const isCrowded = Object.keys(found.curves).length > MAX_NAMED && !place.seeds;
  const split = (chart) =>
    chart.keys.map((key, index) => ({
      ...chart,
      keys: [key],
      names: undefined,
      title: chart.names ? `${chart.title}, ${chart.names[index]}` : chart.title,
    }));
  const drawn = wanted
    .flatMap((chart) => (isCrowded ? split(chart) : [chart]))
    .map((chart) => ({ ...chart, lines: linesOf(chart) }))
    .filter((chart) => chart.lines.length);
  if (!drawn.length)
    return put($("charts"), h("p", { class: "empty" }, "No step has ended yet. Curves appear with the first one."));
  const shape = (chart) =>
    chart.title + chart.lines.map((line) => line.name + (line.low ? "~" : "")).join() + Boolean(place.smooth);
  const shapes = drawn.map(shape).join("|");
  if (isUpdate && shapes === $("charts").dataset.shapes)
    return drawn.forEach((chart, index) => charts[index].update(chart));
  charts.forEach((chart) => chart.plot.destroy());
  put($("charts"));
  $("charts").dataset.shapes = shapes;
  charts = drawn.map((chart) => createChart(chart));
}

/** The columns that uPlot draws: for each line its extent or raw values faintly, and the line itself. */
function columnsOf(chart) {
  const weight = Number(place.smooth ?? 0),
    clean = (values) => (place.log ? values.map((value) => (value > 0 ? value : null)) : values);
  const columns = [found.x],
    series = [],
    bands = [];
  for (const line of chart.lines) {
    const numPoints = line.mean.filter((value) => value !== null).length;
    if (line.low && !line.isSparse) {
      for (const part of [line.high, line.low]) {
        columns.push(clean(part.map((value, index) => value ?? line.mean[index])));
        series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true, isFaint: true });
      }
      bands.push({ series: [columns.length - 2, columns.length - 1], fill: fade(line.color, 0.18) });
    } else if (weight && !line.isSparse && chart.lines.length <= MAX_NAMED) {
      columns.push(clean(line.mean));
      series.push({ stroke: fade(line.color, 0.3), width: 1, points: { show: false }, spanGaps: true, isFaint: true });
    }
    columns.push(clean(weight && !line.isSparse ? smooth(line.mean, weight) : line.mean));
    series.push({
      label: line.name,
      stroke: line.color,
      width: 1.6,
      dash: line.dash,
      spanGaps: true,
      points: {
        show: (line.isSparse && chart.lines.length <= MAX_NAMED) || numPoints < FEW_POINTS,
        size: line.isSparse ? 6 : 4,
        fill: line.color,
      },
    });
  }
  return { columns, series, bands };
}

/** A colour of the style sheet as a canvas understands it. */
function themeColor(name) {
  const probe = document.body.appendChild(h("i"));
  probe.style.color = `var(${name})`;
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

const fade = (color, share) => color.replace(")", ` / ${share})`);

/** Draw a chart and its legend; return what resizes, updates and ends it. */
function createChart(chart) {
  const legend = h("p", { class: "legend" }),
    canvas = h("div", { class: "plot", role: "img" });
  const save = {
    type: "button",
    class: "plain facts",
    "aria-label": `Save ${chart.title} as PNG`,
    onclick: () => savePicture(chart.title, plot),
  };
  const head = h("div", { class: "chart-head" }, h("h2", {}, chart.title), h("button", save, "PNG"));
  $("charts").append(h("div", { class: "chart" }, head, h("p", { class: "facts" }, chart.hint || " "), canvas, legend));
  let parts = columnsOf(chart),
    focused = null;
  const renewLegend = (index) => {
    put(legend, drawLegend(parts, index, focused));
    canvas.setAttribute("aria-label", `${chart.title}: ${describeLast(parts)}`);
  };
  const hooks = {
    setCursor: [(self) => renewLegend(self.cursor.idx)],
    setSeries: [
      (self, index) => {
        focused = index ? (self.series[index].label ?? null) : null;
        renewLegend(self.cursor.idx);
      },
    ],
    setSelect: [zoomToSelection],
  };
  const options = { ...optionsOf(parts), width: canvas.clientWidth || MIN_WIDTH, hooks };
  const plot = new uPlot(options, parts.columns, canvas);
  renewLegend(null);
  const update = (changed) => {
    parts = columnsOf(changed);
    plot.setData(parts.columns);
    renewLegend(plot.cursor.idx);
  };
  return { plot, canvas, update };
}

function optionsOf({ series, bands }) {
  const line = themeColor("--line"),
    axis = { stroke: themeColor("--soft"), grid: { stroke: line, width: 1 }, ticks: { stroke: line, size: 4 } };
  const formatY = (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick)));
  const resetZoom = () => () => {
    zoomTo(null);
    return null;
  };
  return {
    height: HEIGHT,
    padding: [10, 18, 0, 0],
    legend: { show: false },
    cursor: {
      y: false,
      sync: { key: "curves" },
      focus: { prox: 24 },
      drag: { x: true, y: false, setScale: false },
      points: { size: 6 },
      bind: { dblclick: resetZoom },
    },
    focus: { alpha: series.length > MAX_NAMED * 2 ? 0.25 : 1 },
    scales: { x: { time: false }, y: place.log ? { distr: 3 } : { range: (_, low, high) => rangeOf(low, high) } },
    axes: [
      { ...axis, font: FONT, size: 28, space: 60, incrs: TICKS[axisOf()], values: (_, ticks) => ticks.map(formatX) },
      { ...axis, font: FONT, size: 54, values: formatY },
    ],
    series: [{}, ...series],
    bands,
  };
}

function zoomToSelection(plot) {
  const { left, width } = plot.select;
  if (width < 4) return; // a click
  zoomTo([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
}

const linesIn = ({ series, columns }) =>
  series.map((one, position) => ({ ...one, values: columns[position + 1] })).filter((one) => !one.isFaint);
const lastOf = (values) => values.findLast((value) => value !== null && value !== undefined);

function describeLast(parts) {
  const named = linesIn(parts).slice(0, MAX_NAMED);
  return named.map((one) => `${one.label} ${number(lastOf(one.values))}`).join(", ");
}

/** The values at the cursor, or the last ones; of many lines only that of the focused one. */
function drawLegend(parts, index, focused) {
  const isPointed = index !== null && index !== undefined,
    lines = linesIn(parts);
  const shown = lines.length <= MAX_NAMED ? lines : lines.filter((one) => one.label === focused);
  const valueOf = ({ values }) => (isPointed ? (values[index] ?? lastOf(values.slice(0, index))) : lastOf(values));
  const drawn = shown.map((one) => {
    const swatch = h("i", { class: one.dash.length ? "dashed swatch" : "swatch" });
    swatch.style.borderColor = one.stroke;
    return h("span", {}, swatch, `${one.label} `, h("b", {}, number(valueOf(one))));
  });
  return [
    isPointed && h("span", {}, `${axisOf()} ${formatX(parts.columns[0][index])}`),
    drawn,
    !shown.length && h("span", {}, `${lines.length} lines; point at one for its name`),
  ];
}

/** A scale that contains 0 unless the values are far from it, and never ends at a line. */
function rangeOf(low, high) {
  if (low === null || high === null) return [0, 1];
  const bottom = low > 0 && low < (high - low) * 2 ? 0 : low,
    size = high - bottom || Math.abs(high) || 1;
  return [bottom === 0 ? 0 : bottom - size * 0.06, high === bottom ? high + size : high + size * 0.06];
}

function savePicture(title, plot) {
  const source = plot.ctx.canvas,
    scale = devicePixelRatio,
    room = 28 * scale;
  const picture = h("canvas", { width: source.width, height: source.height + room });
  const context = picture.getContext("2d"),
    style = getComputedStyle(document.body);
  context.fillStyle = style.backgroundColor;
  context.fillRect(0, 0, picture.width, picture.height);
  context.drawImage(source, 0, room);
  context.fillStyle = style.color;
  context.font = `${14 * scale}px system-ui`;
  context.fillText(
    `${title}: ${[...state.ticked].slice(0, 3).join(", ")}${state.ticked.size > 3 ? " …" : ""}`,
    8 * scale,
    19 * scale,
  );
  picture.toBlob((blob) => {
    const url = URL.createObjectURL(blob);
    h("a", { href: url, download: `${title.toLowerCase().replace(/\W+/g, "-")}.png` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });
}

/** Fit the charts to the width of the window. */
export function resizeCurves() {
  for (const { plot, canvas } of charts) plot.setSize({ width: canvas.clientWidth || MIN_WIDTH, height: HEIGHT });
}
