import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { api } from "./api";
import type { Session } from "./types";

function App() {
  const [sessions, setSessions] = useState<Session[]>([]);
  const [error, setError] = useState("");
  useEffect(() => {
    api.list(100).then((page) => setSessions(page.data), (err: Error) => setError(err.message));
  }, []);
  return (
    <main>
      <h1>Rocket</h1>
      {error && <p role="alert">{error}</p>}
      <ul>
        {sessions.map((s) => (
          <li key={s.id}>
            {s.title || s.id}: {s.state}, {s.length} tokens
          </li>
        ))}
      </ul>
    </main>
  );
}

render(<App />, document.getElementById("app")!);
