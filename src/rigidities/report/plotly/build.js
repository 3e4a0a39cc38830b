/* Builds plotly.min.js: plotly.js with the traces "scatter" and "bar" alone, for the report's page.
   The README beside this file says how to run it. */
"use strict";
const fs = require("fs");
const esbuild = require("esbuild");

// Texts for plotly's reference documentation, which plotly's own builds leave out too.
const documentation = new RegExp(
  [
    "\\s*description: '.*',?",
    "\\s*description: \\[[\\s\\S]*?\\]\\.join\\([^)]*\\),?",
    "\\s*requiredOpts: \\[[\\s\\S]*?\\],?",
    "\\s*otherOpts: \\[[\\s\\S]*?\\],?",
  ].join("|"),
  "g"
);
// Components that no plot of the page uses.
const unused = [
  "annotations3d", "images", "updatemenus", "sliders", "rangeslider", "rangeselector",
];

const smaller = {
  name: "smaller",
  setup(build) {
    build.onLoad({ filter: /plotly\.js\/src\/.*\.js$/ }, ({ path }) => {
      let contents = fs.readFileSync(path, "utf8").replace(documentation, "");
      if (path.endsWith("/src/core.js")) {
        for (const name of unused) {
          contents = contents.replace(`require('./components/${name}'),`, "");
        }
      }
      return { contents, loader: "js" };
    });
    build.onLoad({ filter: /\.css$/ }, () => ({ contents: "", loader: "js" }));
  },
};

const version = require("plotly.js/package.json").version;
esbuild.build({
  stdin: {
    contents:
      'const Plotly = require("plotly.js/lib/core");' +
      'Plotly.register([require("plotly.js/lib/bar")]);' +
      "module.exports = Plotly;",
    resolveDir: process.cwd(),
  },
  bundle: true,
  minify: true,
  format: "iife",
  globalName: "Plotly",
  target: "es2020",
  charset: "ascii",
  legalComments: "none",
  define: { global: "window" },
  banner: {
    js: `/* plotly.js v${version} (scatter and bar). Copyright 2012-2026, Plotly, Inc. MIT license. */`,
  },
  outfile: "plotly.min.js",
  plugins: [smaller],
});
