// Key figures, learning curves, and what the run is and costs.

const BINS = ["1", "2-5", "6-8", "9", "10-49", ">=50"];
const AXES = { iteration: "iteration", steps: "environment steps", tokens: "tokens", hours: "hours" };

// Where each iteration lies on every axis: counts that add up.
function positions(metrics) {
  let steps = 0;
  let tokens = 0;
  let seconds = 0;
  const found = new Map([[0, { iteration: 0, steps: 0, tokens: 0, hours: 0 }]]);
  for (const line of metrics) {
    const played = line.env_runners || {};
    steps += played.num_env_steps_sampled || 0;
    tokens += (played.num_prompt_tokens || 0) + (played.num_response_tokens || 0);
    seconds += line.seconds || 0;
    found.set(line.iteration, { iteration: line.iteration, steps, tokens, hours: seconds / 3600 });
  }
  return found;
}

function drawCurves(data, axis) {
  const places = positions(data.metrics);
  const lines = data.metrics;
  const xName = AXES[axis];
  const along = (read) => lines.map((line) => [places.get(line.iteration)[axis], read(line)]);
  const runner = (name) => (line) => (line.env_runners || {})[name];
  const learned = (module, name) => (line) => ((line.learners || {})[module] || {})[name];
  const modules = [...new Set(lines.flatMap((line) => Object.keys(line.advantages || {})))].sort();
  const each = (name) => modules.map((module, i) => ({
    name: modules.length > 1 ? module : name.replaceAll("_", " "),
    color: `var(--c${(i % 9) + 1})`,
    points: along(learned(module, name)),
  }));
  const tested = (name) => data.evaluations
    .filter((line) => places.has(line.iteration))
    .map((line) => [places.get(line.iteration)[axis], (line.env_runners || {})[name]]);
  const pair = (title, name, format, range) => chart({
    title, xName, format, range,
    series: [
      { name: "training", color: "var(--c1)", points: along(runner(name)) },
      { name: "evaluation", color: "var(--c2)", points: tested(name), dots: true },
    ],
  });
  const histogram = (title, kind) => chart({
    title, xName, format: percent, stacked: true, range: [0, 1],
    series: BINS.map((bin, i) => ({
      name: bin, color: `var(--s${i + 1})`, points: along(runner(`step_groups/${kind}_share/${bin}`)),
    })),
  });
  const phases = data.phases.map((phase, i) => ({
    name: phase.replaceAll("_", " "), color: `var(--c${(i % 9) + 1})`, points: along((line) => phaseSeconds(line, phase, data.phases)),
  })).filter((one) => one.points.some(([, y]) => y > 0));
  const split = modules.flatMap((module, i) => {
    const suffix = modules.length > 1 ? ` (${module})` : "";
    const read = (name) => (line) => ((line.advantages || {})[module] || {})[name];
    return [
      { name: "episode level" + suffix, color: `var(--c${(2 * i) % 9 + 1})`, points: along(read("episode_mean_abs")) },
      { name: "step level" + suffix, color: `var(--c${(2 * i + 1) % 9 + 1})`, points: along(read("step_mean_abs")) },
    ];
  });
  const simple = (title, names, format, range) => chart({
    title, xName, format, range,
    series: names.map(([name, label], i) => ({ name: label, color: `var(--c${i + 1})`, points: along(runner(name)) })),
  });
  const charts = [
    pair("Success rate", "success_rate", percent, [0, 1]),
    pair("Return of an episode", "episode_return_mean"),
    pair("Steps of an episode", "episode_len_mean"),
    histogram("Sizes of step groups, share of groups (Fig. 5)", "group"),
    histogram("Sizes of step groups, share of steps", "step"),
    simple("Singletons: states seen once", [["step_groups/group_share/1", "of groups"], ["step_groups/step_share/1", "of steps"]], percent, [0, 1]),
    chart({ title: "Advantages: mean size of what each level adds", xName, series: split }),
    chart({ title: "Seconds of an iteration (Fig. 6)", xName, series: phases, stacked: true }),
    simple("Tokens of a step", [["prompt_tokens_mean", "prompt"], ["response_tokens_mean", "response"]]),
    simple("Valid actions and cut responses", [["valid_action_rate", "valid actions"], ["response_cut_rate", "cut responses"]], percent, [0, 1]),
    chart({ title: "KL to the reference", xName, series: each("kl") }),
    chart({ title: "Entropy", xName, series: each("entropy") }),
    chart({ title: "Gradient norm", xName, series: each("gradient_norm") }),
    chart({ title: "Engine and learner: gap of log-probabilities", xName, series: each("engine_logp_gap") }),
  ];
  replace(byId("charts"), ...charts);
}

function phaseSeconds(line, phase, phases) {
  const timers = line.timers || {};
  if (phase !== "other") return isNumber(timers[phase]) ? timers[phase] : 0;
  const known = phases.reduce((sum, name) => sum + (isNumber(timers[name]) ? timers[name] : 0), 0);
  return Math.max(0, (line.seconds || 0) - known);
}

function drawTiles(data) {
  const last = data.metrics[data.metrics.length - 1] || {};
  const played = last.env_runners || {};
  const tested = data.evaluations[data.evaluations.length - 1];
  const cost = data.receipt.cost || {};
  const tokens = cost.tokens || {};
  const tiles = [
    ["Iterations", readable(last.iteration || 0)],
    ["Success, training", percent(played.success_rate)],
    ["Success, evaluation", tested ? percent((tested.env_runners || {}).success_rate) : "–"],
    ["Return", readable(played.episode_return_mean)],
    ["Episodes", readable(cost.episodes)],
    ["Environment steps", readable(cost.env_steps)],
    ["Tokens", readable((tokens.prompt || 0) + (tokens.response || 0))],
    ["Time", duration(cost.hours_total)],
    ["Price", isNumber(cost.price) ? cost.price.toFixed(2) : "–"],
  ];
  replace(byId("tiles"), ...tiles.map(([name, value]) =>
    element("div", { class: "tile" }, element("span", { class: "muted small" }, name), element("b", {}, value))));
}

// What the watchdog has seen and done, each with the worst episodes of its iteration.
function drawEvents(data) {
  const events = Array.isArray(data.events) ? data.events : [];
  const body = byId("events");
  body.hidden = events.length === 0;
  const header = ["group", "member", "return", "steps", "invalid actions", "last response"];
  replace(body, element("h2", {}, "Events"), ...events.map((event) => {
    const listed = Array.isArray(event.worst) ? event.worst : [];
    const worst = listed.filter((one) => one !== null && typeof one === "object").map((one) => [
      shown(one.group), shown(one.member), readable(one.return), shown(one.steps),
      shown(one.invalid_actions), shown(one.last_response),
    ]);
    return element("div", { class: "card event" },
      element("h3", {}, `${shown(event.kind)} in iteration ${shown(event.iteration)}`),
      element("p", {}, shown(event.message)),
      ...(worst.length ? [element("details", {},
        element("summary", {}, `The ${worst.length} worst episodes of the iteration`),
        element("div", { class: "scroll", tabindex: "0" }, table(header, worst, new Set([0, 1, 2, 3, 4]))))] : []));
  }));
}

function duration(hours) {
  if (!isNumber(hours)) return "–";
  if (hours >= 1) return `${hours.toFixed(1)} h`;
  return hours >= 1 / 60 ? `${(60 * hours).toFixed(1)} min` : `${(3600 * hours).toFixed(1)} s`;
}

function drawFacts(data) {
  const run = data.run;
  const cost = data.receipt.cost || {};
  const rows = (object) => Object.entries(object || {}).map(([name, value]) => [name, shown(value)]);
  const card = (title, ...content) => element("div", { class: "card" }, element("h3", {}, title), ...content);
  const what = [
    ["run", run.run_id], ["environment", run.env], ["model", run.model], ["created", run.created],
    ...rows(run.seeds).map(([name, value]) => [`seed: ${name}`, value]),
    ...rows(run.commits).map(([name, value]) => [`commit: ${name}`, value]),
    ...(Array.isArray(run.starts) ? run.starts : []).map((start) => [`start after iteration ${start.after_iteration}`, start.time]),
  ].map(([name, value]) => [name, shown(value)]);
  const data_ = (Array.isArray(run.data) ? run.data : []).map((one) => [shown(one.path), `${one.files} files, ${readable(one.bytes)} bytes`, shown(one.sha256)]);
  replace(
    byId("facts-body"),
    card("What it is", table(["", ""], what)),
    card("What it cost",
      table(["phase", "hours"], rows(cost.hours).map(([name, value]) => [name.replaceAll("_", " "), Number(value).toFixed(4)]), new Set([1])),
      table(["tokens", "number"], rows(cost.tokens).map(([name, value]) => [name, Number(value).toLocaleString("en")]), new Set([1]))),
    card("How to repeat it", element("pre", { tabindex: "0" }, run.command || "the settings were given by a Python program, see below")),
    card("Versions and machine", table(["", ""], [...rows(run.versions), ...rows(run.machine)])),
    card("Settings that differ from the defaults", table(["setting", "value"], rows(run.changed))),
    ...(data_.length ? [card("Data", element("div", { class: "paths" }, table(["path", "size", "SHA-256"], data_)))] : []),
    card("All settings", element("details", {}, element("summary", {}, "Show"), element("div", { class: "scroll", tabindex: "0" }, table(["setting", "value"], rows(run.settings))))),
  );
}
