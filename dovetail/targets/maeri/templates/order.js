"use strict";
(() => {
  const chart = document.querySelector('.chart[data-name="main"]'), main = chart.querySelector("svg");
  const timed = [main, ...document.querySelectorAll("svg.strip")], ticks = chart.querySelectorAll(".ticks span");
  const tip = document.getElementById("tip"), choice = document.getElementById("layer");
  const whole = main.viewBox.baseVal.width;
  let from = 0, to = whole;
  function show(begin, end) {
    const span = Math.min(whole, Math.max(8, end - begin));
    from = Math.min(Math.max(0, begin), whole - span);
    to = from + span;
    for (const svg of timed) {
      const box = svg.viewBox.baseVal;
      svg.setAttribute("viewBox", [from, 0, span, box.height].join(" "));
    }
    ticks.forEach((tick, at) => {
      tick.textContent = Math.floor(from + span * at / (ticks.length - 1)).toLocaleString("en");
    });
  }
  function zoom(factor, where) {
    show(where - (where - from) * factor, where + (to - where) * factor);
  }
  function cycle(event) {
    const box = main.getBoundingClientRect();
    return from + (event.clientX - box.left) / box.width * (to - from);
  }
  function layer(number) {
    const found = document.querySelector('details[data-layer="' + number + '"]');
    choice.value = number;
    if (!found) { show(0, whole); return; }
    const begin = Number(found.dataset.begin), end = Number(found.dataset.end), edge = (end - begin) / 50;
    show(begin - edge, end + edge);
  }
  document.getElementById("controls").hidden = false;
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => {
      if (button.dataset.zoom === "all") layer("");
      else zoom(Number(button.dataset.zoom), (from + to) / 2);
    });
  choice.addEventListener("change", () => layer(choice.value));
  for (const link of document.querySelectorAll("a[data-layer]"))
    link.addEventListener("click", event => {
      layer(link.dataset.layer);
      document.querySelector('details[data-layer="' + link.dataset.layer + '"]').open = true;
      if (!link.closest("#layers")) return;
      event.preventDefault();  // the legend's links stay at the drawing
      main.scrollIntoView({ block: "nearest" });
    });
  main.addEventListener("wheel", event => {
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, cycle(event));
  }, { passive: false });
  let held = null;
  main.style.touchAction = "pan-y";
  main.addEventListener("pointerdown", event => { held = cycle(event); });
  window.addEventListener("pointerup", () => { held = null; });
  main.addEventListener("pointermove", event => {
    if (held !== null && event.buttons) {
      const by = held - cycle(event);
      show(from + by, to + by);
    }
  });
  main.addEventListener("dblclick", () => layer(""));
  main.tabIndex = 0;
  main.addEventListener("keydown", event => {
    const step = (to - from) / 8, moves = { ArrowLeft: -step, ArrowRight: step };
    if (event.key in moves) show(from + moves[event.key], to + moves[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(0.8, (from + to) / 2);
    else if (event.key === "-") zoom(1.25, (from + to) / 2);
    else if (event.key === "Home") layer("");
    else return;
    event.preventDefault();
  });
  let shown = null;
  document.addEventListener("pointermove", event => {
    const group = event.target.closest && event.target.closest("svg g, svg path");
    const title = group && group.querySelector("title");
    if (shown && shown !== title) { shown.textContent = shown.dataset.said; shown = null; tip.hidden = true; }
    if (!title) return;
    if (!shown) {
      title.dataset.said = title.textContent;  // the browser's own hint would come on top
      tip.textContent = title.textContent.replaceAll("; ", "\n");
      title.textContent = "";
      shown = title;
      tip.hidden = false;
    }
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const top = event.clientY + 18 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10
      : event.clientY + 18;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, top) + "px";
  });
})();
