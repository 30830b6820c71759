package sessions

import "encoding/json"

// typed checks that a field has its type's JSON, and makes it what this server
// would have written: nil where it is null.
func (b *bundleReader) typed(name string, data *json.RawMessage, to any) error {
	if len(*data) == 0 || string(*data) == "null" {
		*data = nil
		return nil
	}
	err := json.Unmarshal(*data, to)
	if err == nil {
		*data, err = json.Marshal(to)
	}
	if err != nil {
		return b.bad("%s: %v", name, err)
	}
	if escapesNUL(*data) {
		return b.bad("%s: has NUL characters", name)
	}
	return nil
}

func (b *bundleReader) tokens(name string, ids []int32) error {
	for i, id := range ids {
		if id < 0 || int(id) >= b.model.Vocab {
			return b.bad("%s[%d]: the model has no token %d", name, i, id)
		}
	}
	return nil
}

// turnOf finds the turn that a line of a session names; nil for none.
func (b *bundleReader) turnOf(name *string) (*bundleTurnRef, error) {
	if name == nil {
		return nil, nil
	}
	id, _ := parseID(turnPrefix, *name)
	t, ok := b.turns[id]
	if !ok || t.session != b.at.session {
		return nil, b.bad("turn_id: %q is none of the session's turns", *name)
	}
	return t, nil
}
