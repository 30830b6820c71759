package model

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// reader takes keys out of one JSON object, keeps the first error, and can say what nobody asked for.
type reader struct {
	keys map[string]json.RawMessage
	used map[string]bool
	at   string // path of the object, for messages
	err  error
}

// object decodes one JSON object and refuses repeated keys.
func object(text []byte) (map[string]json.RawMessage, error) {
	dec := json.NewDecoder(bytes.NewReader(text))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("not a JSON object")
	}
	keys := map[string]json.RawMessage{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, err
		}
		k, _ := t.(string)
		if _, dup := keys[k]; dup {
			return nil, fmt.Errorf("key %q is given twice", k)
		}
		var v json.RawMessage
		if err := dec.Decode(&v); err != nil {
			return nil, err
		}
		keys[k] = v
	}
	if _, err := dec.Token(); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); err != io.EOF {
		return nil, errors.New("text after the JSON object")
	}
	return keys, nil
}

func (r *reader) refuse(key, format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%s%s: %w", r.at, key, fmt.Errorf(format, args...))
	}
}

// get decodes a key into v and tells whether it is there; null counts as absent.
func (r *reader) get(key string, v any) bool {
	r.used[key] = true
	raw, ok := r.keys[key]
	if !ok || string(raw) == "null" {
		return false
	}
	if err := json.Unmarshal(raw, v); err != nil {
		r.refuse(key, "%w", err)
		return false
	}
	return true
}

func (r *reader) str(key, def string) string {
	r.get(key, &def)
	return def
}

func (r *reader) strs(key string) (v []string) {
	if r.get(key, &v); v == nil && key != "indexer_types" {
		r.refuse(key, "missing")
	}
	return v
}

func (r *reader) flag(key string, def bool) bool {
	r.get(key, &def)
	return def
}

func (r *reader) flagMust(key string, want bool) {
	if v := r.flag(key, want); v != want {
		r.refuse(key, "%v is not supported, only %v", v, want)
	}
}

func (r *reader) strMust(key, want string) {
	if v := r.str(key, want); v != want {
		r.refuse(key, "%q is not supported, only %q", v, want)
	}
}

func (r *reader) integer(key string, def int) int {
	r.get(key, &def)
	return def
}

// dim is an integer that must be there, in [1, maxDim].
func (r *reader) dim(key string) int {
	v := 0
	if !r.get(key, &v) {
		r.refuse(key, "missing")
		return 1
	}
	if v < 1 || v > maxDim {
		r.refuse(key, "%d is not in [1, %d]", v, maxDim)
		return 1
	}
	return v
}

// number is a finite float; a NaN default makes it mandatory.
func (r *reader) number(key string, def float32) float32 {
	if !r.get(key, &def) && def != def {
		r.refuse(key, "missing")
		return 1
	}
	return def
}

// ints is a list of token ids, or one id.
func (r *reader) ints(key string) []int32 {
	r.used[key] = true
	raw, ok := r.keys[key]
	if !ok || string(raw) == "null" {
		return nil
	}
	if raw[0] != '[' {
		raw = append(append(json.RawMessage{'['}, raw...), ']')
	}
	var v []int32
	if err := json.Unmarshal(raw, &v); err != nil {
		r.refuse(key, "%w", err)
	}
	return v
}

// quantisation reads the algorithm named by quantization_config. The scale tensors decide how a weight is read; the
// name is checked so that a format that we do not know is refused before its tensors are misread.
func (r *reader) quantisation() string {
	r.used["quantization_config"] = true
	var q struct {
		Method    string `json:"quant_method"`
		Algo      string `json:"quant_algo"`
		GroupSize *int   `json:"group_size"`
		Block     []int  `json:"weight_block_size"`
		Format    string `json:"fmt"`
	}
	raw, ok := r.keys["quantization_config"]
	if !ok || string(raw) == "null" {
		return ""
	}
	if err := json.Unmarshal(raw, &q); err != nil {
		r.refuse("quantization_config", "%w", err)
		return ""
	}
	switch q.Method {
	case "modelopt", "modelopt_fp4":
		if !slices.Contains([]string{"NVFP4", "FP8", "MIXED_PRECISION", "W4A16_NVFP4"}, q.Algo) {
			r.refuse("quantization_config", "quant_algo %q is not supported (known: NVFP4, FP8, MIXED_PRECISION, W4A16_NVFP4)", q.Algo)
		}
		if q.GroupSize != nil && *q.GroupSize != 16 {
			r.refuse("quantization_config", "group_size %d is not supported, only 16", *q.GroupSize)
		}
		return q.Algo
	case "fp8":
		if q.Block != nil && !slices.Equal(q.Block, []int{128, 128}) {
			r.refuse("quantization_config", "weight_block_size %v is not supported, only [128 128]", q.Block)
		}
		if q.Format != "" && q.Format != "e4m3" {
			r.refuse("quantization_config", "fmt %q is not supported, only e4m3", q.Format)
		}
		return "FP8"
	}
	r.refuse("quantization_config", "quant_method %q is not supported (known: modelopt, modelopt_fp4, fp8)", q.Method)
	return ""
}

// rest refuses keys that were neither read nor listed as without effect.
func (r *reader) rest(harmless []string) error {
	var unknown []string
	for k := range r.keys {
		if !r.used[k] && !slices.Contains(harmless, k) {
			unknown = append(unknown, r.at+k)
		}
	}
	if len(unknown) == 0 {
		return nil
	}
	slices.Sort(unknown)
	return fmt.Errorf("unknown keys, refused because they may change the model: %s", strings.Join(unknown, ", "))
}
