package tier

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

const crashDir = "ROCKET_TIER_CRASH_DIR" // makes the test binary the child of TestKill

// crashChild puts and drops in a directory until it is killed, and says on stdout what is about to be dropped and what
// is done. The line of a record is its seed: everything in it follows from that.
func crashChild(dir string) {
	d, stored, err := OpenDisk(testOptions(dir))
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	var b [8]byte
	if _, err := readRandom(b[:]); err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	seed := binary.LittleEndian.Uint64(b[:])
	r := rand.New(rand.NewPCG(seed, 1))
	live := map[int64]bool{}
	for _, s := range stored {
		live[s.Handle] = true
	}
	fmt.Println("open")
	for {
		n := int(r.Uint32())
		rec := testRecord(n, n%3)
		if d.Bytes()+d.Cost(25001) <= d.Max() && r.IntN(3) > 0 {
			h, err := d.Put(context.Background(), rec, testPayload(rec, uint64(n))...)
			if err != nil {
				fmt.Println("error", err)
				os.Exit(1)
			}
			live[h] = true
			fmt.Println("put", h, n)
			continue
		}
		for h := range live {
			fmt.Println("dropping", h)
			if err := d.Drop(h); err != nil {
				fmt.Println("error", err)
				os.Exit(1)
			}
			delete(live, h)
			fmt.Println("dropped", h)
			break
		}
	}
}

func readRandom(b []byte) (int, error) {
	f, err := os.Open("/dev/urandom")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return f.Read(b)
}

// TestKill kills a child that puts and drops, at random points: what was acknowledged is there, bit for bit, what was
// dropped is not, and what was under way is there whole or not at all.
func TestKill(t *testing.T) {
	const kills = 25
	dir := t.TempDir()
	known := map[int64]int{}   // acknowledged: handle -> line
	unsure := map[int64]bool{} // a drop was under way
	puts, drops, halves := 0, 0, 0
	for kill := range kills {
		clear(unsure)
		dropped := map[int64]bool{}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), crashDir+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		var timer *time.Timer
		for lines.Scan() {
			var h int64
			var n int
			switch word, rest, _ := strings.Cut(lines.Text(), " "); word {
			case "open":
				timer = time.AfterFunc(time.Duration(rand.IntN(60_000))*time.Microsecond, func() { _ = cmd.Process.Kill() })
			case "put":
				fmt.Sscan(rest, &h, &n)
				known[h], puts = n, puts+1
			case "dropping":
				fmt.Sscan(rest, &h)
				unsure[h] = true
			case "dropped":
				fmt.Sscan(rest, &h)
				delete(known, h)
				delete(unsure, h)
				dropped[h], drops = true, drops+1
			default:
				t.Errorf("child: %s", lines.Text())
			}
		}
		_ = cmd.Wait() // killed
		if timer == nil {
			t.Fatal("the child did not open the store")
		}
		timer.Stop()
		d, stored, err := OpenDisk(testOptions(dir))
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Check(); err != nil {
			t.Fatalf("kill %d: %v", kill, err)
		}
		back := map[int64]bool{}
		for _, s := range stored {
			back[s.Handle] = true
			n, acked := known[s.Handle]
			if dropped[s.Handle] {
				t.Errorf("kill %d: handle %d is back after its drop", kill, s.Handle)
			}
			if !acked { // complete, but the child was killed before it could say so
				halves++
				n = s.MTPValidFrom
				known[s.Handle] = n
			}
			rec := testRecord(n, n%3)
			if !sameRecord(s.Record, rec) {
				t.Errorf("kill %d: handle %d is %+v, want %+v", kill, s.Handle, s.Record, rec)
			}
			if err := sameBytes(d, s.Handle, rec, uint64(n)); err != nil {
				t.Errorf("kill %d: %v", kill, err)
			}
		}
		for h := range known {
			if !back[h] {
				if !unsure[h] {
					t.Errorf("kill %d: acknowledged handle %d is lost", kill, h)
				}
				delete(known, h)
			}
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d puts, %d drops, %d records complete but not acknowledged", puts, drops, halves)
	if puts < kills || drops == 0 {
		t.Errorf("%d puts and %d drops are too few", puts, drops)
	}
}
