// The page of runs: plain modules, no build step. Texts of models and agents only ever become text nodes.

const SERIES = ["#2f7ed8", "#d8663b", "#2a9d6f", "#a056b8", "#b58900", "#c2185b"]; // distinct for colour-blind readers
const CHARTS = [
  { title: "Reward", keys: ["reward", "eval_reward"], names: ["training", "held out"], hint: "mean of each step; dots are evaluations" },
  { title: "Loss", keys: ["loss"], hint: "of the policy objective" },
  { title: "Entropy", keys: ["entropy"], hint: "nats per token; a fall to 0 ends exploration" },
  { title: "KL", keys: ["kl", "reference_kl", "teacher_kl"], names: ["to the sampler", "to the reference", "to the teacher"], hint: "nats per token" },
  { title: "Staleness", keys: ["staleness_mean", "staleness_max"], names: ["mean", "max"], hint: "versions between sampling and training" },
  { title: "Tokens per second", keys: ["tokens_per_second"], hint: "sampled" },
  { title: "Lengths", keys: ["drawn_tokens_mean", "trained_tokens_mean"], names: ["sampled", "trained"], hint: "tokens per episode" },
  { title: "Seconds per step", keys: ["rollout_seconds", "train_seconds"], names: ["rollout", "training"], hint: "" },
  { title: "Groups without signal", keys: ["zero_variance_groups", "groups"], names: ["equal rewards", "all"], hint: "equal rewards teach nothing" },
  { title: "Failed episodes", keys: ["failed_episodes", "truncated_turns"], names: ["failed", "cut answers"], hint: "" },
  { title: "Gap of engine and trainer", keys: ["behaviour_gap_mean", "behaviour_gap_max"], names: ["mean", "max"], hint: "nats per token, before the update" },
  { title: "Gradient norm", keys: ["grad_norm"], hint: "" },
];
const TABS = { curves: "Curves", groups: "Groups", conversations: "Conversations", failures: "Failures", system: "System", settings: "Settings" };

const state = { runs: [], chosen: null, overlaid: new Set(), metrics: new Map(), summary: null, tab: "curves", charts: [], view: {} };
const $ = (id) => document.getElementById(id);

function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const put = (element, ...children) => element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  // 0.00001234 would not fit beside an axis.
  return Math.abs(value) < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, "e") : value.toPrecision(4).replace(/\.?0+$/, "");
}

function counted(count, word) {
  return `${number(count)} ${word}${count === 1 ? "" : "s"}`;
}

async function get(name, parameters) {
  const answer = await fetch(`/api/${name}?${new URLSearchParams(parameters ?? {})}`);
  const document = await answer.json();
  if (!answer.ok) throw new Error(document.error ?? `status ${answer.status}`);
  return document;
}

// ------------------------------------------------------------------------------------------------- data

async function loadMetrics(run) {
  const known = state.metrics.get(run) ?? { records: [], cursor: "" };
  for (;;) {
    const found = await get("metrics", { run, after: known.cursor });
    if (found.is_restarted) known.records = [];
    known.records.push(...found.records);
    const isDone = found.records.length === 0;
    known.cursor = found.cursor;
    if (isDone) break;
  }
  state.metrics.set(run, known);
}

async function choose(run) {
  state.chosen = run;
  history.replaceState(null, "", `#${encodeURIComponent(run)}`); // a link to this run
  state.overlaid.add(run);
  state.view = {};
  await refresh(["metrics"]);
  await show(state.tab);
}

async function refresh(parts) {
  if (parts.includes("metrics")) for (const run of state.overlaid) await loadMetrics(run);
  state.summary = await get("run", { run: state.chosen });
  drawHead();
}

function listen() {
  const events = new EventSource("/api/events");
  events.onopen = () => setState(true);
  events.onerror = () => setState(false);
  events.onmessage = async (event) => {
    const { run, parts, runs } = JSON.parse(event.data);
    if (runs) {
      state.runs = runs;
      if (!runs.some((known) => known.name === state.chosen)) location.reload();
      drawRuns();
      return;
    }
    if (!state.overlaid.has(run)) return;
    // The head shows steps and the record; the list of groups needs the versions, too.
    if (parts.includes("metrics") || parts.includes("record") || state.tab === "groups") await refresh(parts);
    const shown = { curves: ["metrics"], groups: ["groups", "evaluations"], conversations: ["sessions"], failures: ["failures"] };
    // What is being read stays where it is: lists are renewed, an open conversation or group is not.
    if (run === state.chosen || state.tab === "curves") if ((shown[state.tab] ?? []).some((part) => parts.includes(part))) await show(state.tab, true);
  };
}

function setState(isConnected) {
  state.isConnected = isConnected;
  const status = state.summary?.is_live ? "live" : state.summary?.record?.status ?? (state.summary?.has_begun === false ? "not begun" : "from files");
  const isWell = isConnected && ["live", "running", "serving"].includes(status);
  $("state").textContent = isConnected ? status : "connection lost";
  $("state").className = `chip ${isWell ? "live" : ["failed", "killed"].includes(status) || !isConnected ? "lost" : ""}`;
}

// ------------------------------------------------------------------------------------------------- head

function drawHead() {
  const summary = state.summary;
  $("title").textContent = summary.name;
  document.title = `${summary.name}: step ${summary.steps}`;
  const end = { failed: "This run failed. ", killed: "This run was killed. " }[summary.record?.status];
  $("verdict").hidden = !summary.verdict && !end;
  put($("verdict"), end && h("p", {}, h("b", {}, end), summary.record.reason ?? ""), summary.verdict && h("p", {}, h("b", {}, "This run does not learn. "), summary.verdict));
  setState(state.isConnected ?? true);
  const facts = {
    step: number(summary.steps),
    "reward, first → last": `${number(summary.reward_first)} → ${number(summary.reward_last)}`,
    "held out, first → last": `${number(summary.eval_first)} → ${number(summary.eval_last)}`,
    seconds: number(Math.round(summary.seconds)),
    version: number(summary.version),
    ...(summary.model ? { model: summary.model } : {}),
  };
  put($("summary"), ...Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  drawRuns();
  put($("tabs"), ...Object.entries(TABS).map(([name, title]) =>
    h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-selected": String(name === state.tab), onclick: () => show(name) }, title)));
}

function drawRuns() {
  const isHost = state.runs.some((run) => run.state);
  $("runs").hidden = state.runs.length < 2 && !isHost;
  const list = state.runList ??= h("span", { id: "run-list" });
  // Made once: what is being typed survives the arrival of a step.
  state.runSearch ??= h("input", { type: "search", placeholder: "Filter runs …", "aria-label": "filter runs", oninput: drawRuns });
  const words = state.runSearch.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = state.runs.filter((run) => words.every((word) => `${run.name} ${run.state ?? ""} ${run.failure ?? ""}`.toLowerCase().includes(word)));
  if (list.parentElement === null) put($("runs"), state.runs.length > 1 && state.runSearch, list);
  put(list, found.length === 0 && h("span", { class: "facts" }, "No run matches."), ...found.map((run) => {
    const swatch = h("span", { class: "swatch" });
    swatch.style.color = color(run.name);
    const box = h("input", { type: "checkbox", "aria-label": `overlay ${run.name}`, onchange: async (event) => {
      if (event.target.checked) state.overlaid.add(run.name);
      else if (run.name !== state.chosen) state.overlaid.delete(run.name);
      const before = state.tab;
      await refresh(["metrics"]);
      if (state.tab === before) await show("curves"); // unless the reader has chosen another view meanwhile
    } });
    box.checked = state.overlaid.has(run.name);
    const button = h("button", { type: "button", "aria-pressed": String(run.name === state.chosen), onclick: () => choose(run.name) }, run.name);
    const facts = [run.state, run.requests ? `${run.requests} requests` : "", run.starts > 1 ? `${run.starts} starts` : ""].filter(Boolean).join(", ");
    return h("label", { title: run.failure }, box, swatch, button, run.state && h("span", { class: `facts ${run.failure ? "bad" : ""}` }, ` ${facts}`));
  }));
}

const color = (run) => SERIES[state.runs.findIndex((known) => known.name === run) % SERIES.length];

async function show(tab, isUpdate = false) {
  if (tab !== state.tab) state.view = {};
  state.tab = tab;
  for (const button of $("tabs").children) button.setAttribute("aria-selected", String(button.id === `tab-${tab}`));
  try {
    await VIEWS[tab](isUpdate);
  } catch (error) {
    put($("view"), h("p", { class: "bad" }, error.message));
  }
}

// ------------------------------------------------------------------------------------------------- curves

function curves(isUpdate) {
  const runs = [...state.overlaid];
  const logged = new Set();
  for (const run of runs) for (const record of state.metrics.get(run).records) for (const key of Object.keys(record))
    if (/[/]/.test(key) && !key.endsWith("/count")) logged.add(key);
  const wanted = [...CHARTS, ...[...logged].sort().map((key) => ({ title: key, keys: [key], hint: "logged by the agents" }))];
  const data = wanted.map((chart) => seriesOf(chart, runs)).filter((chart) => chart !== null);
  if (data.length === 0) {
    put($("view"), h("p", { class: "empty" }, "No step has ended yet. Curves appear with the first one."));
    state.charts = [];
    return;
  }
  const names = data.map((chart) => chart.title + chart.labels.join()).join("|");
  if (isUpdate && names === state.view.names) {
    data.forEach((chart, index) => state.charts[index].setData(chart.data));
    return;
  }
  state.view.names = names;
  const grid = h("div", { class: "charts" });
  put($("view"), grid);
  state.charts = data.map((chart) => {
    const box = h("div", { class: "chart" }, h("h3", {}, chart.title), h("p", {}, chart.hint || " "));
    grid.append(box);
    return draw(chart, box);
  });
}

function seriesOf(chart, runs) {
  const steps = [...new Set(runs.flatMap((run) => state.metrics.get(run).records.map((record) => record.step)))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const data = [steps], labels = [], colors = [], isDashed = [];
  for (const run of runs) chart.keys.forEach((key, index) => {
    const values = new Array(steps.length).fill(null);
    for (const record of state.metrics.get(run).records) if (typeof record[key] === "number") values[place.get(record.step)] = record[key];
    if (values.every((value) => value === null)) return;
    data.push(values);
    labels.push([runs.length > 1 ? run : "", chart.names?.[index] ?? ""].filter(Boolean).join(" ") || chart.title.toLowerCase());
    colors.push(runs.length > 1 ? color(run) : SERIES[index]);
    isDashed.push(index > 0);
  });
  return labels.length ? { ...chart, data, labels, colors, isDashed } : null;
}

function draw(chart, box) {
  const style = getComputedStyle(document.body);
  const axis = { stroke: style.color, grid: { stroke: "#8883", width: 1 }, ticks: { stroke: "#8883" }, font: "11px system-ui" };
  return new uPlot({
    width: Math.max(box.clientWidth - 20, 200), height: 170, padding: [8, 8, 0, 0], legend: { live: true }, cursor: { y: false },
    scales: { x: { time: false }, y: { range: (_, low, high) => uPlot.rangeNum(Math.min(low ?? 0, high === low ? 0 : Infinity), high === low && !high ? 1 : high ?? 1, 0.1, true) } },
    axes: [axis, { ...axis, size: 52, values: (_, ticks) => ticks.map(number) }],
    series: [{ label: "step", value: (_, value) => number(value) }, ...chart.labels.map((label, index) => ({
      label, stroke: chart.colors[index], width: 2, spanGaps: true, dash: chart.isDashed[index] ? [6, 4] : [],
      points: { show: chart.data[index + 1].filter((value) => value !== null).length < 30 }, value: (_, value) => number(value),
    }))],
  }, chart.data, box);
}

// ------------------------------------------------------------------------------------------------- groups

async function groups(isUpdate) {
  const view = state.view;
  const versions = state.summary.versions;
  view.kind ??= versions.rollout.length ? "rollout" : "eval-rollout";
  const known = versions[view.kind];
  if (view.version === undefined || view.isNewest) { view.version = known.at(-1); view.isNewest = true; }
  const all = view.version === "all", begun = (version) => view.kind === "rollout" ? `, begun in step ${version + 1}` : "";
  const pick = h("select", { "aria-label": "version", onchange: async (event) => {
    view.version = event.target.value === "all" ? "all" : Number(event.target.value); view.isNewest = view.version === known.at(-1); await groups(true);
  } }, h("option", { value: "all", selected: all }, "all versions"), known.map((version) => h("option", { value: version, selected: version === view.version }, `version ${version}${begun(version)}`)));
  const kind = h("select", { "aria-label": "kind", onchange: async (event) => { state.view = { kind: event.target.value, filters: view.filters }; await groups(); } },
    [["rollout", "training"], ["eval-rollout", "evaluation"]].map(([name, title]) => h("option", { value: name, selected: name === view.kind }, title)));
  const renew = () => groups(true);
  // Made once: what is being typed survives the arrival of a step.
  const filters = view.filters ??= {
    query: h("input", { type: "search", placeholder: "Search in problems and texts …", "aria-label": "search groups", onchange: renew }),
    equal: select("rewards", renew, [["", "any rewards"], ["yes", "equal rewards"], ["no", "different rewards"]]),
    low: h("input", { type: "number", step: "any", placeholder: "from", "aria-label": "lowest mean reward", onchange: renew }),
    high: h("input", { type: "number", step: "any", placeholder: "to", "aria-label": "highest mean reward", onchange: renew }),
    source: sourceSelect(renew),
  };
  const bar = () => h("div", { class: "bar" }, kind, pick, filters.query, filters.equal,
    h("span", { class: "range" }, h("span", { class: "facts" }, "mean"), filters.low, filters.high), filters.source);
  if (known.length === 0) return put($("view"), bar(), h("p", { class: "empty" }, "No group has ended yet, or rollout.dump_to_file is off."));
  const found = await get("groups", { run: state.chosen, kind: view.kind, version: all ? "" : view.version, ...valuesOf(filters) });
  const values = found.groups.flatMap((group) => group.rewards), low = Math.min(0, ...values), high = Math.max(...values, low + 1e-9);
  const rows = found.groups.map((group) => {
    const open = () => openGroup(group.version, group.task);
    return h("tr", { class: "pick", tabindex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
      all && h("td", { class: "number" }, number(group.version)),
      h("td", {}, group.task),
      h("td", {}, h("span", { class: "rewards" }, group.rewards.map((reward) => h("i", { class: `r${Math.round((reward - low) / (high - low) * 4)}`, title: number(reward) })))),
      h("td", { class: "number" }, number(mean(group.rewards))),
      h("td", { class: "why" }, group.rewards.length > 1 && new Set(group.rewards).size === 1 ? "equal: no signal" : ""));
  });
  const titles = [...(all ? ["version"] : []), "problem", "rewards", "mean", ""];
  const count = `${rows.length} group${rows.length === 1 ? "" : "s"}${found.is_cut ? ", the newest; narrow the search for others" : ""}. Each square is a training row: the greener, the higher its reward.`;
  const table = h("div", {}, h("p", { class: "facts", id: "num-groups" }, count),
    h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, titles.map((name) => h("th", {}, name)))), h("tbody", {}, rows))));
  const detail = isUpdate && view.detail ? view.detail : h("div", { id: "detail" }, h("p", { class: "empty" }, "Choose a problem to see its rows next to each other."));
  view.detail = detail;
  if (isUpdate && view.table?.isConnected) { // the bar stays, with the focus of the reader
    view.table.replaceWith(table);
    if (view.pick.options.length !== pick.options.length || view.pick.value !== pick.value) view.pick.replaceWith(pick);
  } else put($("view"), bar(), h("div", { class: "split" }, table, detail));
  Object.assign(view, { table, pick: pick.isConnected ? pick : view.pick });

  async function openGroup(version, task) {
    const { rows } = await get("group", { run: state.chosen, kind: view.kind, version, task });
    const untrained = (row) => row.untrained ? ` · not trained: ${row.untrained.replaceAll("_", " ")}` : "";
    const shared = rows.length > 1 && rows.every((row) => row.prompt === rows[0].prompt);
    put(detail, 
      h("h2", {}, `Problem ${task}, version ${version}`),
      shared && h("details", { class: "card" }, h("summary", {}, "What the model read, with system text and tools (the same for all rows)"), h("pre", {}, rows[0].prompt ?? "")),
      h("div", { class: "columns" }, rows.map((row) => h("div", { class: "card" },
        h("p", { class: "facts" }, `sample ${row.sample_idx} · reward `, h("b", {}, number(row.reward)), ` · ${row.above_mean >= 0 ? "+" : ""}${number(row.above_mean)} against the group's mean${untrained(row)} · ${row.trained_tokens} trained tokens · version ${row.head_version}${row.tail_version === row.head_version ? "" : `–${row.tail_version}`}`),
        !shared && h("details", {}, h("summary", {}, "what the model read"), h("pre", {}, row.prompt ?? "")),
        h("pre", {}, row.completion ?? "")))));
  }
}

function select(name, onchange, options) {
  return h("select", { "aria-label": name, onchange }, options.map(([value, title]) => h("option", { value }, title)));
}

function sourceSelect(onchange) { // nothing for a run of one dataset
  const names = new Set((state.metrics.get(state.chosen)?.records ?? []).flatMap((record) => Object.keys(record).map((key) => /^source\/([^/]+)\//.exec(key)?.[1]).filter(Boolean)));
  return names.size ? select("source", onchange, [["", "all sources"], ...[...names].sort().map((name) => [name, name])]) : null;
}

const valuesOf = (filters) => Object.fromEntries(Object.entries(filters).filter(([, input]) => input).map(([name, input]) => [name, input.value]));

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(values.length, 1);

// ------------------------------------------------------------------------------------------------- conversations

async function conversations(isUpdate) {
  const view = state.view;
  const search = view.search ?? h("input", { type: "search", placeholder: "Search in texts, tools, reasons …", "aria-label": "search", onchange: () => conversations(true) });
  const filter = view.filter ?? h("select", { "aria-label": "filter", onchange: () => conversations(true) },
    [["", "all"], ["train", "training"], ["eval", "evaluation"], ["failed", "failed"], ["rewarded", "with reward"], ["untrained", "with untrained turns"]].map(([value, title]) => h("option", { value }, title)));
  const paint = view.paint ?? h("select", { "aria-label": "colour tokens by", onchange: () => view.open !== undefined && openSession(view.open) },
    [["p", "tokens by probability"], ["m", "tokens by training mask"], ["v", "tokens by version"]].map(([value, title]) => h("option", { value }, title)));
  Object.assign(view, { search, filter, paint });
  const keep = { "": () => true, train: (s) => !s.is_eval, eval: (s) => s.is_eval, failed: (s) => s.failure !== null, rewarded: (s) => s.reward > 0, untrained: (s) => s.has_untrained }[filter.value];
  const found = (await get("sessions", { run: state.chosen, query: search.value })).sessions.filter(keep);
  const rows = found.map((session) => h("tr", { class: "pick", tabindex: 0, onclick: () => openSession(session.index), onkeydown: (event) => event.key === "Enter" && openSession(session.index) },
    h("td", { class: "number" }, number(session.version)), h("td", { class: "number" }, number(session.reward)), h("td", { class: "number" }, number(session.num_turns)),
    h("td", {}, `problem ${session.task_id}`, session.is_eval ? " · evaluation" : "", session.failure ? h("span", { class: "bad" }, " · failed") : "")));
  const table = h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["version", "reward", "turns", "episode"].map((name) => h("th", {}, name)))), h("tbody", {}, rows)));
  view.detail ??= h("div", {}, h("p", { class: "empty" }, found.length ? "Choose a conversation." : "No conversation yet."));
  if (isUpdate && view.table) view.table.replaceWith(table);
  else put($("view"), h("div", { class: "bar" }, search, filter, paint), h("div", { class: "split" }, table, view.detail));
  view.table = table;

  async function openSession(index) {
    view.open = index;
    const session = await get("session", { run: state.chosen, index });
    const untrained = new Map((session.untrained ?? []).map((entry) => [entry.interaction, entry]));
    put(view.detail, 
      h("h2", {}, `Problem ${session.task_id}, sample ${session.sample_idx}, version ${session.version}`),
      h("p", { class: "facts" }, `reward ${number(session.reward)} · ${counted(session.num_turns, "turn")} · ${number(session.seconds)} s`, ...Object.entries(session.logged ?? {}).map(([name, value]) => ` · ${name} ${number(value)}`)),
      session.failure && h("pre", { class: "bad" }, session.failure),
      ...asTree(session.turns).map((turn, place) => drawTurn(turn, place, session, untrained)),
      session.num_turns > session.turns.length && h("p", { class: "facts" }, `${counted(session.num_turns - session.turns.length, "more turn")}.`));
  }

  function drawTurn(turn, place, session, untrained) {
    const mask = expand(turn.mask ?? [], turn.tokens.length), versions = expand(turn.versions ?? [], turn.tokens.length);
    const order = [...new Set(versions)];
    const facts = [`turn ${place + 1}`, turn.tag && `agent ${turn.tag}`, `${turn.num_prompt_tokens} prompt + ${turn.num_tokens} sampled tokens`,
      turn.reward !== null && `reward ${number(turn.reward)}`, typeof turn.return === "number" && `return ${number(turn.return)}${turn.credit === "inherited" ? " (inherited from the episode)" : ""}`,
      ...(turn.versions ?? []).map(([version, count]) => `${count} tokens under version ${version}`), turn.finish].filter(Boolean).join(" · ");
    const entry = untrained.get(turn.id);
    const why = entry ? entry.reason.replaceAll("_", " ") : turn.num_tokens && !mask.some(Boolean)
      ? (session.failure ? "the episode failed" : session.is_eval ? "evaluations are not trained" : "no row holds this turn") : null;
    const paints = { p: (i) => shade(turn.tokens[i][1]), m: (i) => (mask[i] ? "p0" : "p4"), v: (i) => `v${order.indexOf(versions[i]) % 5}` }[view.paint.value];
    return h("div", { class: `turn d${Math.min(turn.depth, 4)}` },
      h("p", { class: "facts" }, facts),
      turn.fork && turn.fork !== "root" && h("p", { class: "why" }, `New branch of tokens: ${turn.fork.replaceAll("_", " ")}.`),
      turn.failure && h("p", { class: "bad" }, turn.failure),
      why && h("p", { class: "why" }, `Not trained: ${why}.`),
      turn.messages.map((message) => drawMessage(message, "")), turn.answer && drawMessage(turn.answer, "answer"),
      turn.tokens.length > 0 && h("p", { class: "tokens" }, turn.tokens.map(([text, logprob], i) =>
        h("i", { class: `${paints(i)}${mask[i] ? " on" : ""}`, title: `log-probability ${number(logprob)}, version ${versions[i] ?? "–"}${mask[i] ? "" : ", not trained"}` }, text)),
        turn.num_tokens > turn.tokens.length ? ` … ${turn.num_tokens - turn.tokens.length} more` : ""));
  }
}

const drawMessage = (message, kind) => h("div", { class: `message ${kind}` }, h("b", {}, message.role),
  message.reasoning && h("pre", { class: "reasoning" }, message.reasoning), message.content && h("pre", {}, message.content),
  (message.tool_calls ?? []).map((call) => h("pre", {}, `${call.name}(${call.arguments})`)));

const shade = (logprob) => `p${logprob === null ? 0 : Math.min(7, Math.max(0, Math.trunc(logprob / -4 * 8)))}`;
const expand = (runs, length) => runs.flatMap(([value, count]) => new Array(count).fill(value)).concat(new Array(length).fill(0)).slice(0, length);

function asTree(turns) { // each turn below its parent; only branches are indented
  const children = new Map(), known = new Set(), ordered = [];
  for (const turn of turns) {
    const parent = known.has(turn.parent) ? turn.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), turn]);
    known.add(turn.id);
  }
  const stack = (children.get(null) ?? []).map((turn) => [turn, 0]).reverse();
  while (stack.length) {
    const [turn, depth] = stack.pop();
    ordered.push({ ...turn, depth });
    const below = children.get(turn.id) ?? [];
    for (const child of [...below].reverse()) stack.push([child, depth + (below.length > 1 ? 1 : 0)]);
  }
  return ordered;
}

// ------------------------------------------------------------------------------------------------- the rest

async function failures(isUpdate) {
  const view = state.view, renew = () => failures(true);
  const filters = view.filters ??= {
    query: h("input", { type: "search", placeholder: "Search in reasons, tracebacks, problems …", "aria-label": "search failures", onchange: renew }),
    outcome: select("kind of failure", renew, [["", "all kinds"], ["failed", "failed"], ["rejected", "rejected by the workflow"], ["cut_short", "cut short"]]),
    eval: select("purpose", renew, [["", "training and evaluation"], ["no", "training"], ["yes", "evaluation"]]),
    first: h("input", { type: "number", min: 0, placeholder: "from", "aria-label": "first version", onchange: renew }),
    last: h("input", { type: "number", min: 0, placeholder: "to", "aria-label": "last version", onchange: renew }),
    source: sourceSelect(renew),
  };
  const isOpen = new Set([...(view.list?.querySelectorAll("details[open]") ?? [])].map((card) => card.dataset.reason));
  const found = (await get("failures", { run: state.chosen, ...valuesOf(filters) })).failures;
  const isFiltered = Object.values(valuesOf(filters)).some(Boolean);
  const list = h("div", {}, found.length ? found.map((kind) => h("details", { class: "card", open: isOpen.has(kind.reason), "data-reason": kind.reason },
    h("summary", {}, h("b", {}, `${kind.count} ×`), ` ${kind.reason}`),
    h("p", { class: "facts" }, `first: problem ${kind.first.task_id}, sample ${kind.first.sample_idx}, version ${kind.first.version}, ${counted(kind.first.turns, "turn")}, ${number(kind.first.seconds)} s · ${(kind.first.outcome ?? "").replaceAll("_", " ")}`),
    kind.count > 1 && h("p", { class: "facts" }, `newest: ${kind.newest.map((one) => `problem ${one.task_id} (version ${one.version}, sample ${one.sample_idx})`).join(", ")}`),
    kind.first.traceback ? h("pre", {}, kind.first.traceback) : h("p", { class: "facts" }, "No traceback.")))
    : [h("p", { class: "empty" }, isFiltered ? "No failure matches." : "No episode failed.")]);
  if (isUpdate && view.list) view.list.replaceWith(list);
  else put($("view"), h("div", { class: "bar" }, filters.query, filters.outcome, filters.eval,
    h("span", { class: "range" }, h("span", { class: "facts" }, "version"), filters.first, filters.last), filters.source), list);
  view.list = list;
}

async function system() {
  state.summary = await get("run", { run: state.chosen });
  const actors = Object.entries(state.summary.actors);
  const names = { state: "state", num_queued: "waiting messages", mailbox_size: "room", num_running: "running", num_waiting_senders: "senders held back", num_handled: "handled", num_failed: "failed", num_cancelled: "cancelled", incarnation: "starts" };
  put($("view"), h("div", { class: "bar" }, h("button", { type: "button", onclick: () => system() }, "Read again")),
    actors.length ? h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ["actor", ...Object.values(names)].map((name) => h("th", {}, name)))),
      h("tbody", {}, actors.map(([name, found]) => h("tr", {}, h("td", {}, name), Object.keys(names).map((key) => h("td", { class: "number" }, number(found[key]))))))))
      : h("p", { class: "empty" }, "The actors of a run can be seen while it runs, on the page that it serves."));
}

function settings() {
  put($("view"), h("p", { class: "facts" }, summaryPath()), h("pre", { class: "card" }, state.summary.config));
}
const summaryPath = () => `${state.summary.run_dir}/config.yaml, with defaults; keys are shortened`;

const VIEWS = { curves, groups, conversations, failures, system, settings };

// ------------------------------------------------------------------------------------------------- start

$("theme").addEventListener("click", async () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = isDark ? "light" : "dark";
  state.view = {};
  await show(state.tab);
});
addEventListener("resize", () => { if (state.tab === "curves") for (const chart of state.charts) chart.setSize({ width: Math.max(chart.root.parentElement.clientWidth - 20, 200), height: 170 }); });

try {
  const { runs, newest } = await get("runs");
  state.runs = runs;
  const linked = decodeURIComponent(location.hash.slice(1));
  const first = state.runs.find((run) => run.name === linked) ?? state.runs.find((run) => run.is_live) ?? state.runs.find((run) => run.name === newest) ?? state.runs[0];
  if (first === undefined) put($("view"), h("p", { class: "empty" }, "There is no run yet. It appears here with the first request of its user."));
  else await choose(first.name);
  listen();
} catch (error) {
  put($("view"), h("p", { class: "bad" }, error.message));
}
