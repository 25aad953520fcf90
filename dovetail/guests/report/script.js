"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const by = name => document.getElementById(name);
  const count = value => value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /* What is under the pointer, in words. */
  function showTip(event, text) {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), gap = 14;
    tip.style.left = Math.max(4, Math.min(event.clientX + gap, window.innerWidth - box.width - 4)) + "px";
    tip.style.top = (event.clientY + gap + box.height > window.innerHeight
      ? event.clientY - gap - box.height : event.clientY + gap) + "px";
  }
  const hideTip = () => { tip.hidden = true; };

  function described(target) {
    const d = target.dataset;
    if (d.buffer !== undefined) {
      const buffer = data.memories[d.memory].buffers[d.buffer];
      const names = [...new Set(buffer.layers)].map(layer => data.layers[layer].name).join(" to ");
      return `${buffer.name} (${buffer.role})\n${count(buffer.bytes)} bytes at ${count(buffer.address)}\n${names}`;
    }
    if (d.live !== undefined) return `bytes of ${d.live} in use`;
    if (d.begin !== undefined) {
      const layer = data.layers[data.steps.begins[d.begin].layer];
      return `${layer.name} on ${layer.engine}`;
    }
    if (d.point !== undefined && data.roofline) {
      const point = data.roofline.points[d.point], layer = data.layers[point.layer];
      const near = point.intensity === null ? "no bytes copied" : `${point.intensity} MACs per byte`;
      return `${layer.name} on ${point.device}\n${point.macs_per_cycle} MACs per cycle, ${near}\n` +
        `${count(layer.time)} cycles`;
    }
    if (d.tip !== undefined) return d.tip;
    return "";
  }
  document.addEventListener("mouseover", event => {
    const text = event.target.dataset ? described(event.target) : "";
    if (text) showTip(event, text); else if (event.target.tagName !== "CANVAS") hideTip();
  });
  document.addEventListener("click", event => {
    if (event.target.dataset.point !== undefined && data.roofline)
      openLayer(data.roofline.points[event.target.dataset.point].layer);
  });

  function openLayer(number) {
    const row = by("layer-" + number);
    if (!row) return;
    location.hash = "layer-" + number;
    reveal(row);
  }
  function reveal(row) {
    for (let part = row; part; part = part.parentElement.closest("details")) part.open = true;
  }
  window.addEventListener("hashchange", () => reveal(document.querySelector(":target")));

  /* Buttons. */
  function toggle(name, change) {
    const button = by(name);
    if (!button) return;
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", on);
      change(on);
    });
  }
  toggle("by-time", on => {
    const list = by("layers"), rows = [...list.children];
    const place = row => Number(row.id.split("-")[1]);
    rows.sort((a, b) => on ? b.dataset.time - a.dataset.time || place(a) - place(b) : place(a) - place(b));
    list.append(...rows);
  });
  toggle("open-all", on => { for (const row of by("layers").querySelectorAll("details")) row.open = on; });
  const themed = by("theme");
  if (themed) themed.addEventListener("click", () => {
    const root = document.documentElement, given = root.dataset.theme;
    const dark = given ? given === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    draw();
  });
  const save = by("save");
  if (save) save.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 2)], {type: "application/json"}));
    link.download = "report.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  const metric = by("metric");
  if (metric) {
    const choose = () => {
      for (const figure of document.querySelectorAll("[data-metric]")) figure.hidden = figure.dataset.metric !== metric.value;
    };
    metric.addEventListener("change", choose);
    choose();
  }

  /* Memory: steps of the program, or cycles. */
  const LEFT = 66, WIDTH = 1000;
  function clock() {
    const begins = data.steps.begins, total = data.cycles.total;
    const steps = [...begins.map(begin => begin.step), data.steps.count];
    const times = [...begins.map(begin => begin.cycle), total];
    return step => {
      let at = 0;
      while (at + 2 < steps.length && steps[at + 1] <= step) at += 1;
      const part = Math.min(Math.max((step - steps[at]) / Math.max(steps[at + 1] - steps[at], 1), 0), 1);
      return (times[at] + part * (times[at + 1] - times[at])) / total;
    };
  }
  function across(inTime) {
    const share = inTime ? clock() : step => step / Math.max(data.steps.count, 1);
    return step => LEFT + (WIDTH - LEFT) * share(step);
  }
  toggle("memory-time", on => {
    const x = across(on);
    for (const rect of document.querySelectorAll("rect[data-buffer]")) {
      const part = data.memories[rect.dataset.memory].buffers[rect.dataset.buffer].parts[rect.dataset.part];
      const [first, last] = rect.classList.contains("tail") ? [part[3], part[4]] : [part[2], part[3]];
      rect.setAttribute("x", x(first));
      rect.setAttribute("width", Math.max(x(last) - x(first), 0.3));
    }
    const begins = data.steps.begins;
    for (const rect of document.querySelectorAll("rect.strip")) {
      const at = Number(rect.dataset.begin), next = at + 1 < begins.length ? begins[at + 1].step : data.steps.count;
      rect.setAttribute("x", x(begins[at].step));
      rect.setAttribute("width", Math.max(x(next) - x(begins[at].step) - 0.6, 0.3));
    }
    for (const line of document.querySelectorAll("path.live")) {
      const before = line.getAttribute("d").match(/[\d.]+ [\d.]+/g).map(pair => pair.split(" ")[1]);
      const moments = [];
      for (const [step] of data.memories[line.dataset.live].live) moments.push(step, step);
      line.setAttribute("d", before.map((y, at) => (at ? "L" + x(moments[at - 1]) : "M" + LEFT) + " " + y).join(""));
    }
  });

  /* The timeline. */
  const gantt = by("gantt");
  const total = data.cycles ? data.cycles.total : 0;
  let from = 0, to = total;
  const lines = gantt ? [...gantt.querySelectorAll("canvas[data-device]")] : [];
  function prepared(canvas) {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return [context, width, height];
  }
  function draw() {
    for (const canvas of lines) drawLine(canvas);
    if (gantt) drawAxis(by("time-axis"));
  }
  function drawLine(canvas) {
    const [context, width, height] = prepared(canvas);
    const fill = colour("--" + canvas.dataset.colour), edge = colour("--paper");
    context.font = "11px system-ui, sans-serif"; context.textBaseline = "middle";
    for (const bar of data.timeline[canvas.dataset.device]) {
      if (bar.end < from || bar.start > to) continue;
      const x = (bar.start - from) / (to - from) * width, end = (bar.end - from) / (to - from) * width;
      context.fillStyle = fill;
      context.fillRect(x, 2, Math.max(end - x, 0.6), height - 4);
      if (end - x > 3) { context.fillStyle = edge; context.fillRect(end - 0.8, 2, 0.8, height - 4); }
      const left = Math.max(x, 0) + 4, room = Math.min(end, width) - left - 4;
      if (room > 26) {
        context.save(); context.beginPath(); context.rect(left, 0, room, height); context.clip();
        context.fillStyle = edge; context.fillText(bar.label, left, height / 2); context.restore();
      }
    }
  }
  function drawAxis(canvas) {
    const [context, width] = prepared(canvas);
    context.fillStyle = colour("--soft"); context.font = "11px system-ui, sans-serif"; context.textBaseline = "top";
    const wanted = (to - from) / Math.max(2, Math.floor(width / 110));
    const power = 10 ** Math.floor(Math.log10(Math.max(wanted, 1)));
    const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= wanted) || power;
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) {
      const x = (at - from) / (to - from) * width;
      context.fillRect(x, 0, 1, 4);
      context.textAlign = x < 20 ? "left" : x > width - 30 ? "right" : "center";
      context.fillText(count(at), x, 6);
    }
  }
  function zoom(factor, middle) {
    const span = Math.min(Math.max((to - from) * factor, 20), total), share = (middle - from) / (to - from);
    from = Math.max(0, Math.min(middle - span * share, total - span)); to = from + span;
    draw();
  }
  function pan(by_) {
    const span = to - from;
    from = Math.max(0, Math.min(from + by_, total - span)); to = from + span;
    draw();
  }
  const at = (canvas, event) => {
    const box = canvas.getBoundingClientRect();
    return from + (event.clientX - box.left) / box.width * (to - from);
  };
  const hit = (canvas, cycle) => {
    const slack = (to - from) / canvas.clientWidth;
    return data.timeline[canvas.dataset.device].find(bar => cycle >= bar.start - slack && cycle < bar.end + slack);
  };
  let held = null, moved = false;
  for (const canvas of lines) {
    canvas.addEventListener("wheel", event => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))
        pan((event.deltaX || event.deltaY) / canvas.clientWidth * (to - from));
      else zoom(event.deltaY < 0 ? 0.8 : 1.25, at(canvas, event));
    }, {passive: false});
    canvas.addEventListener("pointerdown", event => { held = event.clientX; moved = false; });
    canvas.addEventListener("pointermove", event => {
      if (held !== null && Math.abs(event.clientX - held) > 2) {
        pan((held - event.clientX) / canvas.clientWidth * (to - from));
        held = event.clientX; moved = true;
        return;
      }
      const bar = hit(canvas, at(canvas, event));
      if (bar) showTip(event, `${bar.label}\ncycles ${count(bar.start)} to ${count(bar.end)}: ${count(bar.end - bar.start)}`);
      else hideTip();
    });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", () => { from = 0; to = total; draw(); });
    canvas.addEventListener("click", event => {
      const bar = moved ? null : hit(canvas, at(canvas, event));
      const number = bar ? data.layers.findIndex(layer => layer.name === bar.label) : -1;
      if (number >= 0 && canvas.dataset.device === "core") openLayer(number);
    });
    canvas.addEventListener("keydown", event => {
      const span = to - from, steps = {ArrowLeft: () => pan(-span / 8), ArrowRight: () => pan(span / 8),
        "+": () => zoom(0.8, (from + to) / 2), "-": () => zoom(1.25, (from + to) / 2)};
      if (steps[event.key]) { event.preventDefault(); steps[event.key](); }
    });
  }
  window.addEventListener("pointerup", () => { held = null; });
  const press = (name, act) => { if (by(name)) by(name).addEventListener("click", act); };
  press("zoom-in", () => zoom(0.6, (from + to) / 2));
  press("zoom-out", () => zoom(1.6, (from + to) / 2));
  press("zoom-all", () => { from = 0; to = total; draw(); });
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
