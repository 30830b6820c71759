package sessions

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"rocket/internal/localpg/pgtest"
	"rocket/migrations"
)

// Data of the first schema reads the same under the newest one: lines, turns,
// events, the tree; and goes on. The schema is brought there in one step, and
// in steps of one.
func TestSchemaUpgradeKeepsData(t *testing.T) {
	data, err := os.ReadFile("testdata/ledger-00001.sql")
	if err != nil {
		t.Fatal(err)
	}
	golden, err := os.ReadFile("testdata/ledger-00001.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"at once", "step by step"} {
		t.Run(name, func(t *testing.T) {
			url := pgtest.New(t)
			conn, err := pgx.Connect(t.Context(), url)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(t.Context())
			run := func(sql string) {
				t.Helper()
				if _, err := conn.Exec(t.Context(), sql); err != nil {
					t.Fatal(err)
				}
			}
			run("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
			if err := migrations.UpTo(t.Context(), url, 1); err != nil {
				t.Fatal(err)
			}
			run(string(data))
			if name != "at once" {
				files, err := os.ReadDir("../migrations")
				if err != nil {
					t.Fatal(err)
				}
				for version := int64(2); version <= int64(len(files)); version++ { // one past the last changes nothing
					if err := migrations.UpTo(t.Context(), url, version); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := migrations.Up(t.Context(), url); err != nil {
				t.Fatal(err)
			}
			r := openRig(t, url)
			var root string
			for _, s := range must(r.List(t.Context(), DefaultTenant, ListFilter{})).Data {
				root = s.RootID
			}
			got, err := json.MarshalIndent(r.tell(root), "", "\t")
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.TrimSpace(string(golden)), string(got)); diff != "" {
				t.Errorf("read under the newest schema:\n%s", diff)
			}
			r.turn(root, "and on", 3)
			r.fork(root, ForkRequest{N: ptr(2)})
		})
	}
}
