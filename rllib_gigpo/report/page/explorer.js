// The group explorer: iteration, task group, anchor states, actions tried, episodes step by step.

class Explorer {
  constructor(place, loadRows) {
    this.place = place;
    this.loadRows = loadRows;
    this.iterations = [];
    this.chosen = { iteration: null, group: null, agent: null, anchor: null, member: null, step: 0 };
    this.controls = element("div", { class: "controls" });
    this.body = element("div");
    replace(place, this.controls, this.body);
  }

  async setIterations(iterations, recorded) {
    this.iterations = iterations;
    this.recorded = recorded;
    if (!iterations.length) {
      replace(this.controls);
      replace(this.body, element("p", { class: "notice" }, "No rollouts are recorded yet: see recording(every=..., groups=...)."));
      return;
    }
    if (iterations.includes(this.chosen.iteration)) this.drawControls();
    else await this.show({ iteration: iterations[iterations.length - 1] });
  }

  // What the reader chooses stands in the address, so that it can be passed on.
  async choose(change) {
    await this.show(change);
    const { iteration, group, member, step } = this.chosen;
    history.replaceState(null, "", `#iteration=${iteration}&group=${group}&member=${member}&step=${step}`);
  }

  async show(change) {
    const before = this.chosen;
    this.chosen = { ...before, ...change };
    if ("step" in change && !("anchor" in change)) this.chosen.anchor = null;
    if (this.chosen.iteration !== before.iteration) {
      const wanted = this.chosen.iteration;
      try {
        const rows = await this.loadRows(wanted);
        if (this.chosen.iteration !== wanted) return;
        this.rows = rows;
      } catch (error) {
        replace(this.body, element("p", { class: "notice" }, `Iteration ${wanted} could not be read: ${error.message}`));
        return;
      }
    }
    this.settle();
    this.drawControls();
    this.drawGroup();
  }

  // Bring the choice in line with the rows that there are.
  settle() {
    const chosen = this.chosen;
    const first = (values, wanted) => (values.includes(wanted) ? wanted : values[0]);
    chosen.group = first(this.groups(), chosen.group);
    chosen.agent = first(this.agents(), chosen.agent);
    this.own = this.rows.filter((row) => row.group === chosen.group && row.agent === chosen.agent);
    chosen.member = first([...new Set(this.own.map((row) => row.member))], chosen.member);
    const steps = this.episode();
    chosen.step = first(steps.map((row) => row.step), chosen.step);
    // Without a choice of its own the list shows the state of the step that is open.
    const anchors = this.anchors().map((state) => state.id);
    const here = steps.find((row) => row.step === chosen.step).anchor;
    chosen.anchor = anchors.includes(chosen.anchor) ? chosen.anchor : here;
  }

  groups() { return [...new Set(this.rows.map((row) => row.group))].sort((a, b) => a - b); }

  agents() {
    const here = this.rows.filter((row) => row.group === this.chosen.group);
    return [...new Set(here.map((row) => row.agent))].sort();
  }

  episode(member = this.chosen.member) {
    return this.own.filter((row) => row.member === member).sort((a, b) => a.step - b.step);
  }

  anchors() {
    const found = new Map();
    for (const row of this.own) {
      if (!found.has(row.anchor)) found.set(row.anchor, []);
      found.get(row.anchor).push(row);
    }
    return [...found].map(([id, rows]) => ({ id, rows }))
      .sort((a, b) => b.rows.length - a.rows.length || a.rows[0].step - b.rows[0].step);
  }

  drawControls() {
    const pick = (name, values, current, label, onPick) => {
      const list = element("select", { onchange: () => onPick(values[list.selectedIndex]) },
        ...values.map((value) => element("option", { selected: value === current }, label(value))));
      return element("label", {}, name, list);
    };
    const at = this.iterations.indexOf(this.chosen.iteration);
    const go = (step, name) => element("button", {
      type: "button", disabled: !this.iterations[at + step], "aria-label": name,
      onclick: () => this.choose({ iteration: this.iterations[at + step] }),
    }, step < 0 ? "‹" : "›");
    const parts = [
      go(-1, "Earlier iteration"),
      pick("Iteration", this.iterations, this.chosen.iteration, String, (iteration) => this.choose({ iteration })),
      go(1, "Later iteration"),
      pick("Task", this.groups(), this.chosen.group, (group) => this.groupName(group), (group) => this.choose({ group, member: null, step: 0, anchor: null })),
    ];
    if (this.agents().length > 1) parts.push(pick("Agent", this.agents(), this.chosen.agent, String, (agent) => this.choose({ agent, step: 0, anchor: null })));
    if (this.recorded > this.iterations.length) {
      parts.push(element("span", { class: "muted small" }, `${this.iterations.length} of ${this.recorded} recorded iterations are in this file; rllib-gigpo view shows all`));
    }
    const focused = [...this.controls.querySelectorAll("button, select")].indexOf(document.activeElement);
    replace(this.controls, ...parts);
    if (focused >= 0) [...this.controls.querySelectorAll("button, select")][focused]?.focus();
  }

  groupName(group) {
    const rows = this.rows.filter((row) => row.group === group);
    const task = rows.find((row) => row.task_id !== null);
    const outcomes = new Map(rows.map((row) => [row.member, row.won]));
    const known = [...outcomes.values()].filter((won) => won !== null);
    const won = known.length ? `, ${known.filter(Boolean).length}/${known.length} won` : "";
    return `${group}${task ? `: ${task.task_id}` : ""}${won}`;
  }

  drawGroup() {
    const task = this.own.find((row) => row.task) || {};
    replace(
      this.body,
      element("div", { class: "stack" },
        element("div", { class: "card" },
          element("h3", {}, "Task and episodes"),
          element("p", {}, task.task || "The environment names no task."),
          this.episodeTable()),
        element("div", { class: "columns" }, this.anchorList(), this.anchorDetail()),
        this.viewer()),
    );
  }

  episodeTable() {
    const members = [...new Set(this.own.map((row) => row.member))].sort((a, b) => a - b);
    const rows = members.map((member) => {
      const steps = this.episode(member);
      const end = steps[steps.length - 1];
      const won = end.won === null ? "–" : end.won ? element("span", { class: "good" }, "won") : "lost";
      return [
        this.opener(member, 0, `episode ${member}`), won, String(steps.length), readable(end.episode_return),
        signed(end.advantage_episode), end.truncated ? "cut off" : end.terminated ? "ended" : "–",
      ];
    });
    const header = ["episode", "outcome", "steps", "return", "A_E", "how it ended"];
    return element("div", { class: "scroll" }, table(header, rows, new Set([2, 3, 4])));
  }

  opener(member, step, label) {
    const isHere = member === this.chosen.member && step === this.chosen.step;
    return element("button", {
      type: "button", "aria-current": isHere ? "true" : null, "data-open": `${member}:${step}`,
      onclick: () => this.openStep(member, step),
    }, label);
  }

  async openStep(member, step) {
    const row = this.own.find((one) => one.member === member && one.step === step);
    await this.choose({ member, step, anchor: row ? row.anchor : this.chosen.anchor });
    byId("viewer").focus({ preventScroll: true });
    byId("viewer").scrollIntoView({ block: "nearest" });
  }

  anchorList() {
    const states = this.anchors();
    const alone = states.filter((state) => state.rows.length === 1).length;
    const list = element("div", { class: "anchors" }, ...states.map((state) => element("button", {
      type: "button", "aria-pressed": String(state.id === this.chosen.anchor),
      onclick: async () => {
        await this.choose({ anchor: state.id });
        this.body.querySelector('.anchors [aria-pressed="true"]')?.focus();
      },
    },
    element("span", { class: "small muted" }, `${state.rows.length} step${state.rows.length > 1 ? "s" : ""}, mean return ${readable(mean(state.rows.map((row) => row.step_return)))}`),
    state.rows[0].picture ? image(state.rows[0].picture, this.rows.pictures, "thumb") : "",
    element("span", { class: "state" }, stateText(state.rows[0])))));
    return element("div", { class: "card" },
      element("h3", {}, "Anchor states"),
      element("p", { class: "small muted" }, `${states.length} states in this group, ${alone} seen once (their step advantage is 0)`),
      list);
  }

  anchorDetail() {
    const state = this.anchors().find((one) => one.id === this.chosen.anchor);
    const actions = new Map();
    for (const row of state.rows) {
      if (!actions.has(row.action)) actions.set(row.action, []);
      actions.get(row.action).push(row);
    }
    const average = (rows, name) => mean(rows.map((row) => row[name]));
    const order = [...actions].sort((a, b) => average(b[1], "step_return") - average(a[1], "step_return"));
    const rows = order.map(([action, taken]) => [
      element("span", {}, action || "(nothing)", taken.every((row) => row.valid) ? "" : element("span", { class: "minus small" }, " invalid")),
      String(taken.length), readable(average(taken, "step_return")), signed(average(taken, "advantage_step")), signed(average(taken, "advantage")),
      element("span", { class: "chips" }, ...taken.map((row) => this.opener(row.member, row.step, `${row.member}·${row.step}`))),
    ]);
    return element("div", { class: "card" },
      element("h3", {}, "Actions tried in this state"),
      seen(state.rows[0], this.rows.pictures),
      element("div", { class: "scroll" }, table(["action", "times", "return", "A_S", "A", "episode·step"], rows, new Set([1, 2, 3, 4]))));
  }

  viewer() {
    const steps = this.episode();
    const at = steps.findIndex((row) => row.step === this.chosen.step);
    const row = steps[at];
    const move = (to) => { if (steps[to]) this.openStep(row.member, steps[to].step); };
    const button = (to, name) => element("button", { type: "button", disabled: !steps[to], onclick: () => move(to) }, name);
    const numbers = [
      ["parsed action", row.action], ["reward", readable(row.reward)], ["return from here", readable(row.step_return)],
      ["A_E, episode", signed(row.advantage_episode)], ["A_S, step", signed(row.advantage_step)], ["A, used", signed(row.advantage)],
      ["steps at this state", readable(row.anchor_size)],
      ["format", row.format_valid ? "valid" : element("span", { class: "minus" }, "invalid")],
      ["action", row.valid ? "valid" : element("span", { class: "minus" }, "invalid")],
      ["weight version", readable(row.weight_version)],
      ["tokens", `${row.prompt_tokens} prompt, ${row.response_tokens} response (${row.finish_reason})`],
      ["log-probability", readable(row.engine_logp)],
      ["environment seed", row.env_seed === null ? "–" : String(row.env_seed)],
    ];
    const made = element("div", { class: "card", id: "viewer", tabindex: "-1" },
      element("h3", {}, `Episode ${row.member}, step ${row.step} of ${steps.length - 1}`),
      element("div", { class: "controls" }, button(at - 1, "Previous step"), button(at + 1, "Next step"),
        element("span", { class: "small muted" }, "Arrow keys move, too.")),
      element("div", { class: "chips", role: "group", "aria-label": "Steps" }, ...steps.map((one) => this.opener(one.member, one.step, one.step))),
      element("p", {}, ""),
      element("div", { class: "columns" },
        element("div", {}, table(["", ""], numbers)),
        element("div", { class: "stack" },
          ...promptPictures(row).map((name) => image(name, this.rows.pictures)),
          element("div", {}, element("h3", {}, "Prompt"), element("pre", { tabindex: "0", class: "prompt" }, row.prompt || "")),
          element("div", {}, element("h3", {}, "Response"), element("pre", { tabindex: "0", class: "response" }, row.response || "")),
          this.ending(row))));
    made.addEventListener("keydown", (event) => {
      if (event.target.tagName === "PRE") return;
      if (event.key === "ArrowLeft") { event.preventDefault(); move(at - 1); }
      if (event.key === "ArrowRight") { event.preventDefault(); move(at + 1); }
    });
    return made;
  }

  // What the environment answered last: text, a picture, or both.
  ending(row) {
    const parts = [
      row.last_picture ? image(row.last_picture, this.rows.pictures) : null,
      typeof row.last_observation === "string" ? element("pre", { tabindex: "0" }, row.last_observation) : null,
    ].filter(Boolean);
    return parts.length ? element("div", { class: "stack ending" }, element("h3", {}, "What the environment answered last"), ...parts) : "";
  }
}

function stateText(row) {
  return row.anchor_text || row.observation || (row.picture ? "picture " + row.picture.slice(0, 8) : "(empty)");
}

// The pictures of a prompt; where they were not recorded apart, that of the state.
function promptPictures(row) {
  return row.prompt_pictures ? row.prompt_pictures.split(" ") : row.picture ? [row.picture] : [];
}

function image(name, pictures, kind = "seen") {
  const content = pictures[name];
  if (typeof content !== "string" || !/^[A-Za-z0-9+/=]*$/.test(content)) {
    return element("p", { class: "small muted" }, `picture ${name} is not in the run folder`);
  }
  return element("img", { class: kind, alt: "What the environment showed", src: "data:image/png;base64," + content });
}

function seen(row, pictures) {
  const block = element("div", { class: "stack" });
  if (row.picture) block.append(image(row.picture, pictures));
  if (row.observation || !row.picture) block.append(element("pre", { tabindex: "0" }, row.observation || stateText(row)));
  if (row.anchor_text) block.append(element("p", { class: "small muted" }, "anchor: " + row.anchor_text));
  return block;
}

// Rows as objects, from the compact form in which each text stands once.
function unpackRows(packed) {
  const isText = new Set(packed.text_fields);
  const rows = packed.rows.map((cells) => Object.fromEntries(packed.fields.map((name, i) => {
    const value = cells[i];
    return [name, isText.has(name) ? (value === null ? null : packed.texts[value]) : value];
  })));
  rows.pictures = packed.pictures;
  return rows;
}
