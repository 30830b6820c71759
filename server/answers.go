package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"

	"rocket/sessions"
)

// pageBytesNote is for the descriptions of lists.
var pageBytesNote = fmt.Sprintf("A page ends early, with has_more, where its items are large: at about %d bytes, after one item at least.", sessions.PageBytesMax)

// answerChunk is about how much of a list's JSON is in memory at a time.
const answerChunk = 16 << 10

// marshalJSON writes v as JSON. Of lists, which may be large, it has one item's
// text in memory, not all of it beside the items.
func marshalJSON(w io.Writer, v any) error {
	switch v := v.(type) {
	case sessions.SessionPage:
		list := v.Data
		v.Data = []sessions.Session{}
		return marshalList(w, v, "data", list)
	case sessions.TurnPage:
		list := v.Data
		v.Data = []sessions.Turn{}
		return marshalList(w, v, "data", list)
	case EventPage:
		list := v.Data
		v.Data = []sessions.Event{}
		return marshalList(w, v, "data", list)
	case sessions.Tree:
		list := v.Nodes
		v.Nodes = []sessions.Node{}
		return marshalList(w, v, "nodes", list)
	case sessions.Ancestry:
		list := v.Nodes
		v.Nodes = []sessions.Node{}
		return marshalList(w, v, "nodes", list)
	case sessions.Path:
		list := v.Nodes
		v.Nodes = []sessions.Node{}
		return marshalList(w, v, "nodes", list)
	}
	return encoder(w).Encode(v)
}

func encoder(w io.Writer) *json.Encoder {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc
}

// marshalList writes frame with list in the place of its empty list of that
// name. Beside it frame has numbers, names and ids only.
func marshalList[T any](w io.Writer, frame any, name string, list []T) error {
	var around, buf bytes.Buffer
	if err := encoder(&around).Encode(frame); err != nil {
		return err
	}
	empty := fmt.Sprintf("%q:[", name)
	at := bytes.Index(around.Bytes(), []byte(empty))
	if at < 0 {
		return fmt.Errorf("answer: there is no empty list %q in %T", name, frame)
	}
	buf.Write(around.Next(at + len(empty)))
	enc := encoder(&buf)
	for i := range list {
		if i > 0 {
			buf.WriteByte(',')
		}
		if err := enc.Encode(&list[i]); err != nil {
			return err
		}
		buf.Truncate(buf.Len() - 1) // the line's end
		if buf.Len() >= answerChunk {
			if _, err := w.Write(buf.Bytes()); err != nil {
				return err
			}
			buf.Reset()
		}
	}
	buf.Write(around.Bytes())
	_, err := w.Write(buf.Bytes())
	return err
}
