package sessions

import (
	"bytes"
	"testing"
)

// drain reads a bundle as an import does, without a ledger.
func (b *bundleReader) drain(modelDigest, tokenizerDigest string) error {
	if err := b.header(modelDigest, tokenizerDigest); err != nil {
		return err
	}
	if err := b.readSessions(); err != nil {
		return err
	}
	b.rename()
	for ok := true; ok; {
		var err error
		if _, _, _, ok, err = b.turn(); err != nil {
			return err
		}
	}
	for ok := true; ok; {
		var err error
		if _, _, _, ok, err = b.run(); err != nil {
			return err
		}
	}
	for ok := true; ok; {
		var err error
		if _, _, _, ok, err = b.event(); err != nil {
			return err
		}
	}
	return b.trailer()
}

const (
	fuzzSession = "ses_01900000-0000-7000-8000-000000000001"
	fuzzTurn    = "turn_01900000-0000-7000-8000-000000000002"
	fuzzTime    = `"2026-01-02T03:04:05Z"`
)

// fuzzBundle is a bundle that is right: a root of two prompt tokens and a turn.
func fuzzBundle() []byte {
	return reseal([]string{
		`{"type":"header","format":"rocket.sessions","version":1,"exported_at":` + fuzzTime + `,"id":"` + fuzzSession + `","model":"m","model_digest":"d","tokenizer_digest":"t","parity_class":"f32","sessions":1,"turns":1,"token_runs":3,"events":3}` + "\n",
		`{"type":"session","id":"` + fuzzSession + `","parent_id":null,"forked_at":null,"state":"idle","length":5,"turn_count":1,"epoch":2,"first_seq":1,"last_seq":4,"gone_epoch":0,"title":"","labels":{},"pin":false,"ttl_seconds":null,"created_at":` + fuzzTime + `,"updated_at":` + fuzzTime + `,"closed_at":null,"deleted_at":null,"kept_to":null}` + "\n",
		`{"type":"turn","id":"` + fuzzTurn + `","session_id":"` + fuzzSession + `","state":"completed","request":{},"seed":1,"prompt":[3],"from":2,"to":5,"text":"ab","finish_reason":"length","usage":null,"error":null,"logprobs":null,"created_at":` + fuzzTime + `,"started_at":` + fuzzTime + `,"ended_at":` + fuzzTime + `}` + "\n",
		`{"type":"tokens","session_id":"` + fuzzSession + `","turn_id":null,"from":0,"ids":[1,2],"first_seq":1,"cuts":[],"at_ms":[],"time":` + fuzzTime + `,"epoch":1}` + "\n",
		`{"type":"tokens","session_id":"` + fuzzSession + `","turn_id":"` + fuzzTurn + `","from":2,"ids":[3],"first_seq":2,"cuts":[],"at_ms":[],"time":` + fuzzTime + `,"epoch":1}` + "\n",
		`{"type":"tokens","session_id":"` + fuzzSession + `","turn_id":"` + fuzzTurn + `","from":3,"ids":[4,5],"first_seq":3,"cuts":[2],"at_ms":[0],"time":` + fuzzTime + `,"epoch":1}` + "\n",
		`{"type":"event","session_id":"` + fuzzSession + `","turn_id":null,"seq":1,"epoch":1,"event":"session.created","time":` + fuzzTime + `,"data":{"root_id":"` + fuzzSession + `"}}` + "\n",
		`{"type":"event","session_id":"` + fuzzSession + `","turn_id":"` + fuzzTurn + `","seq":2,"epoch":1,"event":"turn.started","time":` + fuzzTime + `,"data":{"from":2,"to":3}}` + "\n",
		`{"type":"event","session_id":"` + fuzzSession + `","turn_id":"` + fuzzTurn + `","seq":4,"epoch":1,"event":"turn.completed","time":` + fuzzTime + `,"data":{}}` + "\n",
	})
}

// FuzzBundle: no bundle makes the reader panic, and every refusal names a line.
func FuzzBundle(f *testing.F) {
	good := fuzzBundle()
	if err := newBundleReader(bytes.NewReader(good), 100).drain("d", "t"); err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	for i, c := range good {
		if c == '\n' || c == ':' { // beginnings of it
			f.Add(good[:i+1])
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		b := newBundleReader(bytes.NewReader(data), 100)
		if err := b.drain("d", "t"); err != nil {
			e, ok := err.(*Error)
			if !ok || e.Code != CodeInvalid || e.Field != "bundle" {
				t.Errorf("%v", err)
			}
		}
	})
}
