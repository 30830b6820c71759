package sessions

import (
	"strings"
	"testing"
)

// durable is a ledger with durability on, as a server has it.
func durable(b *testing.B) *rig {
	b.Helper()
	pg := durableCluster(b)
	return openRig(b, pg.URL())
}

// BenchmarkCommit is the least that a durable call can cost: a transaction of
// one row.
func BenchmarkCommit(b *testing.B) {
	r := durable(b)
	for b.Loop() {
		tx, err := r.pool.Begin(b.Context())
		if err == nil {
			_, err = tx.Exec(b.Context(), "UPDATE servers SET lease_until = lease_until WHERE id = $1", r.me)
		}
		if err == nil {
			err = tx.Commit(b.Context())
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkFork(b *testing.B) {
	r := durable(b)
	s := r.create(strings.Repeat("func main() { return }\n", 40))
	r.turn(s.ID, "", 2)
	for _, n := range []int{1, 8, 64} {
		b.Run("n="+string(rune('0'+n/10))+string(rune('0'+n%10)), func(b *testing.B) {
			var kids []Session
			for b.Loop() {
				kids = append(kids, r.fork(s.ID, ForkRequest{N: &n}).Sessions...)
				if len(kids) > 512 {
					b.StopTimer()
					for _, k := range kids {
						if err := r.Delete(b.Context(), local, k.ID); err != nil {
							b.Fatal(err)
						}
					}
					kids = nil
					b.StartTimer()
				}
			}
		})
	}
}

// BenchmarkTurn is a turn of one token, from the call to its committed end.
func BenchmarkTurn(b *testing.B) {
	r := durable(b)
	s := r.create("func main() {\n")
	for b.Loop() {
		r.turn(s.ID, "", 1)
	}
}
