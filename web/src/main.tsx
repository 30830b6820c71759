import { render } from "preact";
import { App } from "./app";
import { start } from "./store";
import { startTheme } from "./theme";

startTheme();
start();
render(<App />, document.getElementById("app")!);
