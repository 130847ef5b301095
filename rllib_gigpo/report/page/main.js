// Starts the page; a live one asks its server every few seconds for what is new.

const POLL_MS = 3000;

function embeddedJson(id) {
  return JSON.parse(byId(id).textContent);
}

function drawAll(data) {
  const run = data.run;
  document.title = `${shown(run.algorithm)} on ${shown(run.env)}`;
  byId("title").textContent = document.title;
  byId("subtitle").textContent = `run ${shown(run.run_id)} · ${shown(run.model)} · ${shown(run.created)}${data.live ? " · live" : ""}`;
  drawTiles(data);
  drawEvents(data);
  drawCurves(data, byId("axis").value);
  drawFacts(data);
}

async function fetchJson(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
  return answer.json();
}

function startLive(data, explorer) {
  let state = { last: 0, evaluations: data.evaluations.length, events: data.events.length, iterations: data.iterations };
  state.last = data.metrics.length ? data.metrics[data.metrics.length - 1].iteration : 0;
  const poll = async () => {
    try {
      const now = await fetchJson("state");
      byId("status").textContent = "";
      if (JSON.stringify(now) !== JSON.stringify(state)) {
        const wentBack = now.last < state.last;
        const fresh = await fetchJson(`run?after=${wentBack ? 0 : state.last}`);
        const metrics = wentBack ? fresh.metrics : [...data.metrics, ...fresh.metrics];
        Object.assign(data, fresh, { metrics });
        state = now;
        drawAll(data);
        await explorer.setIterations(data.iterations, data.iterations.length);
      }
    } catch (error) {
      byId("subtitle").textContent = `no answer from the server (${error.message}); trying again`;
    }
    setTimeout(poll, POLL_MS);
  };
  setTimeout(poll, POLL_MS);
}

function themeButton() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => { byId("theme").textContent = isDark() ? "Light" : "Dark"; };
  byId("theme").addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); });
  system.addEventListener("change", name);
  name();
}

async function start() {
  const data = embeddedJson("data");
  themeButton();
  drawAll(data);
  byId("axis").addEventListener("change", () => drawCurves(data, byId("axis").value));
  const load = async (iteration) =>
    unpackRows(data.live ? await fetchJson(`rollouts/${iteration}`) : embeddedJson(`rollouts-${iteration}`));
  const explorer = new Explorer(byId("explorer-body"), load);
  const wanted = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const recorded = (data.recorded || data.iterations).length;
  await explorer.setIterations(data.iterations, recorded);
  if (data.iterations.includes(Number(wanted.iteration))) {
    const { iteration, group, member, step } = wanted;
    await explorer.show({ iteration: Number(iteration), group: Number(group), member: Number(member), step: Number(step) });
  }
  if (data.live) startLive(data, explorer);
  document.documentElement.dataset.ready = "true";
}

start();
