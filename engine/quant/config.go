package quant

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"rocket/engine/model"
)

// The names that ModelOpt and the tools that read its checkpoints have for the formats: weights alone are quantised, so
// NVFP4 is the W4A16 one, without input scales.
var algorithms = map[Format]string{NVFP4: "W4A16_NVFP4", FP8: "FP8_PB_WO"}

// groupSize is the number of NVFP4 values that share a scale, as the configs say it.
const groupSize = 16

// producer marks who wrote a checkpoint.
type producer struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// writer is the version of the encoding, raised when the same map and sources give other bytes.
var writer = producer{"rocket", "1"}

// layerQuant is one entry of quantized_layers.
type layerQuant struct {
	Algo      string `json:"quant_algo"`
	GroupSize int    `json:"group_size,omitempty"`
}

// quantizationConfig goes into config.json. One format is described as its own tools do; several as ModelOpt's mixed
// precision, module by module.
type quantizationConfig struct {
	Method     string                `json:"quant_method"`
	Algo       string                `json:"quant_algo,omitempty"`
	GroupSize  int                   `json:"group_size,omitempty"`
	Format     string                `json:"fmt,omitempty"`
	Block      []int                 `json:"weight_block_size,omitempty"`
	Activation string                `json:"activation_scheme,omitempty"`
	Layers     map[string]layerQuant `json:"quantized_layers,omitempty"`
	Ignore     []string              `json:"ignore,omitempty"`
	NotConvert []string              `json:"modules_to_not_convert,omitempty"`
	Producer   producer              `json:"producer"`
}

// hfQuantConfig is hf_quant_config.json. Families and Source say how to make the artifact again.
type hfQuantConfig struct {
	Producer     producer `json:"producer"`
	Quantization struct {
		Algo      string                `json:"quant_algo"`
		KVCache   *string               `json:"kv_cache_quant_algo"`
		GroupSize int                   `json:"group_size,omitempty"`
		Exclude   []string              `json:"exclude_modules,omitempty"`
		Layers    map[string]layerQuant `json:"quantized_layers,omitempty"`
	} `json:"quantization"`
	Families Map    `json:"rocket_families"`
	Source   string `json:"rocket_source_digest"`
}

// configs adds config.json and hf_quant_config.json to files.
func (j *job) configs(files map[string][]byte) error {
	text, err := os.ReadFile(filepath.Join(j.o.Source, "config.json"))
	if err != nil {
		return err
	}
	var config map[string]json.RawMessage
	if err := json.Unmarshal(text, &config); err != nil {
		return fmt.Errorf("config.json: %w", err)
	}
	q, hf := j.describe()
	if config["quantization_config"], err = json.Marshal(q); err != nil {
		return err
	}
	if files["config.json"], err = json.MarshalIndent(config, "", "  "); err != nil {
		return err
	}
	if files["hf_quant_config.json"], err = json.MarshalIndent(hf, "", "  "); err != nil {
		return err
	}
	if _, err := model.ParseConfig(files["config.json"]); err != nil {
		return fmt.Errorf("the config written would not be read: %w", err)
	}
	return nil
}

func (j *job) describe() (q quantizationConfig, hf hfQuantConfig) {
	formats := map[Format]bool{}
	for _, f := range j.o.Map {
		formats[f] = true
	}
	ignored := slices.Sorted(maps.Keys(j.plain))
	hf.Producer, hf.Families, hf.Source = writer, j.o.Map, j.digest
	q.Producer = writer
	if len(formats) > 1 {
		layers := map[string]layerQuant{}
		for module, f := range j.modules {
			l := layerQuant{Algo: algorithms[f]}
			if f == NVFP4 {
				l.GroupSize = groupSize
			}
			layers[module] = l
		}
		q.Method, q.Algo, q.Layers, q.Ignore = "modelopt", "MIXED_PRECISION", layers, ignored
		hf.Quantization.Algo, hf.Quantization.Layers, hf.Quantization.Exclude = q.Algo, layers, ignored
		return q, hf
	}
	if formats[NVFP4] {
		q.Method, q.Algo, q.GroupSize, q.Ignore = "modelopt", algorithms[NVFP4], groupSize, ignored
		hf.Quantization.GroupSize = groupSize
	} else {
		q.Method, q.Format, q.Block, q.Activation, q.NotConvert = "fp8", "e4m3", []int{128, 128}, "dynamic", ignored
	}
	for f := range formats {
		hf.Quantization.Algo = algorithms[f]
	}
	hf.Quantization.Exclude = ignored
	return q, hf
}

// SourceDigest says what the checkpoint in a folder was made of: the digest of the model that Run was given, "" where the
// folder does not say.
func SourceDigest(dir string) (string, error) {
	text, err := os.ReadFile(filepath.Join(dir, "hf_quant_config.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	var hf hfQuantConfig
	if err == nil {
		err = json.Unmarshal(text, &hf)
	}
	if err != nil {
		return "", fmt.Errorf("%s: hf_quant_config.json: %w", dir, err)
	}
	return hf.Source, nil
}
