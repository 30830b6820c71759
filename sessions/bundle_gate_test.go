package sessions

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"rocket/internal/localpg/pgtest"
)

// stuck is a bundle of which a part comes and then nothing, until it ends.
type stuck struct {
	part  io.Reader
	reads chan struct{} // closed when more is wanted than there is
	end   chan struct{}
}

func (s *stuck) Read(p []byte) (int, error) {
	n, err := s.part.Read(p)
	if err == io.EOF {
		close(s.reads)
		<-s.end
	}
	return n, err
}

// Imports that stand still leave other tenants theirs, up to a number; one that has stood still for too long gives way.
func TestSlowImportsLeaveOthersTheirs(t *testing.T) {
	a := newRig(t)
	s := a.create("package a\n")
	bundle := a.export(s.ID)
	r := openRig(t, pgtest.New(t))
	tenant := func(i int) Call {
		name := fmt.Sprint("t", i)
		r.exec("INSERT INTO tenants (id) VALUES ($1) ON CONFLICT DO NOTHING", name)
		return Call{Tenant: name}
	}
	ends := make([]chan error, importsMax)
	slow := make([]*stuck, importsMax)
	begin := func(i int) {
		slow[i] = &stuck{bytes.NewReader(bundle[:len(bundle)/2]), make(chan struct{}), make(chan struct{})}
		ends[i] = make(chan error, 1)
		call := tenant(i)
		go func() {
			_, err := r.Import(t.Context(), call, slow[i])
			ends[i] <- err
		}()
		<-slow[i].reads
		r.imports.mu.Lock()
		r.imports.places[call.Tenant].waited = -time.Hour // however long the test takes
		r.imports.mu.Unlock()
	}
	for i := range importsMax - 1 {
		begin(i)
	}
	_, err := r.Import(t.Context(), tenant(0), bytes.NewReader(bundle))
	wantCode(t, err, CodeOverloaded, "")
	if got, err := r.Import(t.Context(), tenant(importsMax), bytes.NewReader(bundle)); err != nil || got.Session.ID != s.ID {
		t.Fatalf("beside slow ones: %+v, %v", got, err)
	}
	begin(importsMax - 1)
	_, err = r.Import(t.Context(), tenant(importsMax), bytes.NewReader(bundle))
	wantCode(t, err, CodeOverloaded, "")
	// nobody has waited for long, but the second is said to have
	r.imports.mu.Lock()
	r.imports.places["t1"].waited = 2 * bundlePatience
	r.imports.mu.Unlock()
	_, err = r.Import(t.Context(), tenant(importsMax), bytes.NewReader(bundle))
	wantCode(t, err, CodeOverloaded, "")
	for i := range importsMax { // what they sent ends early; for the second it does not matter any more
		close(slow[i].end)
		if code := ErrorCode(<-ends[i]); i == 1 && code != CodeOverloaded || i != 1 && code != CodeInvalid {
			t.Errorf("slow import %d ended with %s", i, code)
		}
	}
	if got, err := r.Import(t.Context(), tenant(0), bytes.NewReader(bundle)); err != nil || got.Session.ID != s.ID {
		t.Errorf("afterwards: %+v, %v", got, err)
	}
	if len(r.imports.places) != 0 || r.imports.bytes != 0 {
		t.Errorf("left behind: %d places, %d bytes", len(r.imports.places), r.imports.bytes)
	}
}

func TestImportGate(t *testing.T) {
	g := bundleGate{what: "import", most: importsMax}
	at := time.Unix(1000, 0)
	enter := func(tenant string) (*gatePlace, func()) {
		t.Helper()
		p, leave, err := g.enter(tenant, at)
		if err != nil {
			t.Fatal(err)
		}
		return p, leave
	}
	full := func(want ...bool) {
		t.Helper()
		_, _, err := g.enter("late", at)
		wantCode(t, err, CodeOverloaded, "")
		for i := range want {
			if got := g.places[fmt.Sprint(i)].yield; got != want[i] {
				t.Errorf("place %d is to give way: %v", i, got)
			}
		}
	}
	var places []*gatePlace
	var leaves []func()
	for i := range importsMax {
		p, leave := enter(fmt.Sprint(i))
		places, leaves = append(places, p), append(leaves, leave)
	}
	wait := func(i int, d time.Duration) error {
		return errors.Join(places[i].begins(at), places[i].ends(0, at.Add(d)))
	}
	if err := errors.Join(wait(1, bundlePatience/2), wait(1, bundlePatience/2), wait(2, 1), places[3].begins(at)); err != nil {
		t.Error(err)
	}
	full(false, false, false, false)
	at = at.Add(bundlePatience + 1) // the last one waits on
	full(false, false, false, true)
	wantCode(t, places[3].ends(0, at), CodeOverloaded, "")
	leaves[3]()
	p, leave := enter("late")
	// memory: a part is free for each, then all share it, and one has its share only
	if err := p.hold(importFreeBytes + importTenantBytesMax); err != nil || g.bytes != importTenantBytesMax {
		t.Errorf("%d bytes are held, %v", g.bytes, err)
	}
	wantCode(t, p.hold(1), CodeOverloaded, "")
	if err := places[0].hold(importFreeBytes + importTenantBytesMax); err != nil {
		t.Error(err)
	}
	if err := places[1].hold(importFreeBytes); err != nil || g.bytes != importBytesMax {
		t.Errorf("%d bytes are held, %v", g.bytes, err)
	}
	wantCode(t, places[1].hold(1), CodeOverloaded, "")
	leave()
	if err := places[1].hold(1); err != nil {
		t.Error(err)
	}
	for _, leave := range leaves[:3] {
		leave()
	}
	if len(g.places) != 0 || g.bytes != 0 {
		t.Errorf("left behind: %d places, %d bytes", len(g.places), g.bytes)
	}
}

// What a bundle makes an import hold is counted, and refused when it is too much.
func TestImportCountsWhatItHolds(t *testing.T) {
	r := newRig(t)
	bundle := r.export(r.grove())
	most, left := 0, 1<<30
	read := func() error {
		b := newBundleReader(bytes.NewReader(bundle), r.info, r.tok)
		b.hold = func(n int) error {
			if left -= n; left < 0 {
				return fail(CodeOverloaded, "too much")
			}
			most += n
			return nil
		}
		return b.drain()
	}
	if err := read(); err != nil {
		t.Fatal(err)
	}
	head := bytes.Index(bundle, []byte(`{"type":"turn"`))
	if most < head-bytes.IndexByte(bundle, '\n') || most > len(bundle)+1<<20 {
		t.Errorf("%d bytes are counted of a bundle of %d, %d of them sessions", most, len(bundle), head)
	}
	all := most
	for _, part := range []int{0, all / 2, all - 1} {
		left = part
		wantCode(t, read(), CodeOverloaded, "")
	}
}
