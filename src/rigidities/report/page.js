/* Draws the plots of a report when they come into view, and follows the choices beside them. */
(function () {
  "use strict";
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures");
  const hovers = read("hovers");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)");
  const drawn = new Set();
  let printing = false;

  const config = {
    responsive: true,
    displaylogo: false,
    // with a finger there is nothing to point with, and dragging scrolls the page
    displayModeBar: coarse.matches ? false : "hover",
    // these alone: plotly would add one that uploads the plot
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    plotlyServerURL: "",
  };

  function colours() {
    const night = dark.matches && !printing;
    return night
      ? { ink: "#e8e8e8", grid: "#3a3f45", line: "#8a9096" }
      : { ink: "#1b1b1b", grid: "#e3e3e3", line: "#777777" };
  }

  function traces(figure, state, ink) {
    const chosen = figure.traces[state.trace].filter(
      (trace) => !trace.meta || !trace.meta.only || trace.meta.only === state.layout
    );
    return chosen.map((trace) => {
      const meta = trace.meta || {};
      const copy = Object.assign({}, trace);
      if (meta.ink) copy.line = Object.assign({}, trace.line, { color: ink });
      if (meta.rows) {
        const texts = hovers[meta.rows].map((text) => text.replaceAll("\n", "<br>"));
        copy.hovertext = meta.picks ? meta.picks.map((i) => texts[i]) : texts;
      }
      return copy;
    });
  }

  function layout(figure, state, shade) {
    const base = figure.layouts[state.layout];
    const axis = (own) =>
      Object.assign({ gridcolor: shade.grid, linecolor: shade.line, zerolinecolor: shade.grid,
        showline: true, tickcolor: shade.line }, own);
    return Object.assign({}, base, {
      xaxis: axis(base.xaxis),
      yaxis: axis(base.yaxis),
      height: figure.height,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: shade.line, activecolor: shade.ink },
      dragmode: coarse.matches ? false : "zoom",
      font: { family: "system-ui, sans-serif", size: 13, color: shade.ink },
    });
  }

  function draw(id) {
    const place = document.getElementById(id);
    const figure = figures[id];
    const shade = colours();
    drawn.add(id);
    place.classList.add("drawn");
    return Plotly.react(
      place, traces(figure, figure.state, shade.ink), layout(figure, figure.state, shade), config
    );
  }

  function redraw() {
    drawn.forEach(draw);
  }

  Object.keys(figures).forEach((id) => {
    const figure = figures[id];
    figure.state = { trace: figure.chosen, layout: Object.keys(figure.layouts)[0] };
  });

  document.querySelectorAll("[data-choice]").forEach((control) => {
    control.addEventListener("change", () => {
      control.dataset.figures.split(" ").forEach((id) => {
        if (control.value in figures[id][control.dataset.choice + "s"]) {
          figures[id].state[control.dataset.choice] = control.value;
        }
        if (drawn.has(id)) draw(id);
      });
    });
  });

  document.querySelectorAll("[data-sections]").forEach((control) => {
    const show = () =>
      document.querySelectorAll("section[data-target]").forEach((section) => {
        section.hidden = section.dataset.target !== control.value;
      });
    control.addEventListener("change", show);
    show();
  });

  const seen = new IntersectionObserver(
    (entries) => entries.forEach((entry) => {
      if (entry.isIntersecting) {
        seen.unobserve(entry.target);
        draw(entry.target.id);
      }
    }),
    { rootMargin: "400px" }
  );
  Object.keys(figures).forEach((id) => seen.observe(document.getElementById(id)));

  dark.addEventListener("change", redraw);
  window.addEventListener("beforeprint", () => {
    printing = true;
    document.querySelectorAll(".plot").forEach((place) => {
      if (!place.closest("section[hidden]")) draw(place.id);
    });
  });
  window.addEventListener("afterprint", () => {
    printing = false;
    redraw();
  });
})();
