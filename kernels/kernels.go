// Package kernels is the thin Go side of kernels.h, the only package with cgo.
//
// Invariants:
//   - Every method maps to one C function of the same name; the rules of arithmetic are stated in kernels.h.
//   - C never keeps Go memory: parameter slices are copied by the op, batches are pinned for one call.
//   - Objects may be freed in any order. C counts references: a plan keeps its weights, buffers and device alive.
//   - A Device may be used by several goroutines; its plans run one at a time. Building one Plan is for one goroutine.
//   - Nothing here aborts the process: wrong arguments are errors naming the op and the argument.
package kernels

// The C mode is ISO on purpose: GCC contracts a*b+c only in GNU mode.

// #cgo CFLAGS: -O3 -std=c11 -Wall -Wextra -fvisibility=hidden -pthread
// #cgo LDFLAGS: -lm -pthread
// #include <stdlib.h>
// #include "kernels.h"
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"time"
	"unsafe"
)

// KPiece, PageTokens and AttnSplit are the fixed cuts of the arithmetic (kernels.h).
const (
	KPiece     = int(C.RK_K_PIECE)
	PageTokens = int(C.RK_PAGE_TOKENS)
	AttnSplit  = int(C.RK_ATTN_SPLIT)
)

// Class is the numeric class: which values are rounded to BF16 when produced.
type Class int

// The numeric classes.
const (
	ClassF32  = Class(C.RK_CLASS_F32)
	ClassBF16 = Class(C.RK_CLASS_BF16)
)

// String returns "f32" or "bf16".
func (c Class) String() string {
	switch c {
	case ClassF32:
		return "f32"
	case ClassBF16:
		return "bf16"
	}
	return fmt.Sprintf("class(%d)", int(c))
}

// ElemBytes is the size of a cached element (latents, keys, conv rows) in the class.
func (c Class) ElemBytes() int {
	if c == ClassBF16 {
		return 2
	}
	return 4
}

// DType is the storage type of a weight part in a checkpoint.
type DType int

// The storage types; their layouts are at rk_matrix in kernels.h.
const (
	F32      = DType(C.RK_DT_F32)
	BF16     = DType(C.RK_DT_BF16)
	FP8Block = DType(C.RK_DT_FP8_BLOCK)
	FP8      = DType(C.RK_DT_FP8)
	NVFP4    = DType(C.RK_DT_NVFP4)
)

// Errors that callers may test for; the text of a failure names the op and the argument.
var (
	ErrInvalid     = errors.New("invalid argument")
	ErrNoMemory    = errors.New("out of memory")
	ErrUnsupported = errors.New("unsupported")
)

// check turns a status into an error with the C side's text. The caller holds the OS thread (text is per thread).
func check(st C.rk_status) error {
	if st == C.RK_OK {
		return nil
	}
	return statusError(int(st))
}

func statusError(st int) error {
	base := ErrInvalid
	switch st {
	case C.RK_ENOMEM:
		base = ErrNoMemory
	case C.RK_EUNSUPPORTED:
		base = ErrUnsupported
	}
	return fmt.Errorf("kernels: %w: %s", base, C.GoString(C.rk_last_error()))
}

// call runs f with the goroutine fixed to its thread, so that the error text read after it is f's own.
func call(f func() C.rk_status) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return check(f())
}

// Device owns a worker pool.
type Device struct{ c *C.rk_device }

// Open starts a device. isa is "auto", "avx512", "avx2", "neon" or "portable"; threads 0 means every core.
func Open(isa string, threads int) (*Device, error) {
	name := C.CString(isa)
	defer C.free(unsafe.Pointer(name))
	var text [256]C.char
	d := C.rk_device_open(name, C.int(threads), &text[0], C.size_t(len(text)))
	if d == nil {
		return nil, fmt.Errorf("kernels: open device %q: %s", isa, C.GoString(&text[0]))
	}
	return &Device{c: d}, nil
}

// Close forbids further runs. The workers end when the last object of the device is freed.
func (d *Device) Close() {
	if d.c != nil {
		C.rk_device_close(d.c)
		d.c = nil
	}
}

// ISA is the instruction set that was chosen.
func (d *Device) ISA() string { return C.GoString(C.rk_device_isa(d.c)) }

// Threads is the number of threads that work on a run, the caller's included.
func (d *Device) Threads() int { return int(C.rk_device_threads(d.c)) }

// Arithmetic names the rules of arithmetic: devices with equal ids give equal bits.
func (d *Device) Arithmetic() string { return C.GoString(C.rk_device_arithmetic(d.c)) }

// MeasureRead is the best rate at which all workers together read a working set of n bytes, in bytes a second.
func (d *Device) MeasureRead(n int, dur time.Duration) float64 {
	return float64(C.rk_device_measure_read(d.c, C.size_t(n), C.double(dur.Seconds())))
}

// MeasureFMA is the best rate of FP32 fused multiply-adds of all workers together (one fma counts one).
func (d *Device) MeasureFMA(dur time.Duration) float64 {
	return float64(C.rk_device_measure_fma(d.c, C.double(dur.Seconds())))
}

// Buffer is device memory: the page arena or the slot arena.
type Buffer struct{ c *C.rk_buffer }

// NameThread names the calling thread, which the caller has locked itself to, for tools that list threads. The kernels'
// own workers are called rk-worker.
func NameThread(name string) {
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	C.rk_name_thread(c)
}

// NewBuffer returns n zeroed bytes.
func (d *Device) NewBuffer(n int) (*Buffer, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if n < 0 {
		return nil, fmt.Errorf("kernels: %w: buffer: %d bytes", ErrInvalid, n)
	}
	b := C.rk_buffer_new(d.c, C.size_t(n))
	if b == nil {
		return nil, statusError(C.RK_ENOMEM)
	}
	return &Buffer{c: b}, nil
}

// Size is the buffer's length in bytes.
func (b *Buffer) Size() int { return int(C.rk_buffer_size(b.c)) }

// Free drops the caller's reference; plans that use the buffer keep theirs.
func (b *Buffer) Free() {
	if b.c != nil {
		C.rk_buffer_free(b.c)
		b.c = nil
	}
}

// Map returns n bytes of the buffer itself from byte offset off, valid until Free, for I/O without a copy: nil where
// they are outside of it or the device's memory cannot be addressed. Who writes them must own them as for Write.
func (b *Buffer) Map(off, n int) []byte {
	if off < 0 || n <= 0 {
		return nil
	}
	p := C.rk_buffer_map(b.c, C.size_t(off), C.size_t(n))
	if p == nil {
		return nil
	}
	return unsafe.Slice((*byte)(p), n)
}

// Write copies p to byte offset off.
func (b *Buffer) Write(off int, p []byte) error {
	return call(func() C.rk_status {
		return C.rk_buffer_write(b.c, C.size_t(off), unsafe.Pointer(unsafe.SliceData(p)), C.size_t(len(p)))
	})
}

// Read fills p from byte offset off.
func (b *Buffer) Read(off int, p []byte) error {
	return call(func() C.rk_status {
		return C.rk_buffer_read(b.c, C.size_t(off), unsafe.Pointer(unsafe.SliceData(p)), C.size_t(len(p)))
	})
}

// Copy copies n bytes between buffers; they may be the same one, and ranges may overlap.
func Copy(dst *Buffer, dstOff int, src *Buffer, srcOff, n int) error {
	return call(func() C.rk_status {
		return C.rk_buffer_copy(dst.c, C.size_t(dstOff), src.c, C.size_t(srcOff), C.size_t(n))
	})
}

// Matrix is a weight part as a checkpoint stores it (rk_matrix in kernels.h).
type Matrix struct {
	DType     DType
	N, K      int
	Data      []byte
	Scale8    []byte
	Scale     []float32
	ScaleRows int
}

// lengths checks that the slices hold what the shape says, which C cannot see.
func (m *Matrix) lengths() error {
	if m.N <= 0 || m.K <= 0 {
		return fmt.Errorf("kernels: %w: weight_fill: shape [%d][%d]", ErrInvalid, m.N, m.K)
	}
	data, scale8, scale := m.N*m.K, 0, 0
	switch m.DType {
	case F32:
		data *= 4
	case BF16:
		data *= 2
	case FP8:
		scale = m.ScaleRows
	case FP8Block:
		scale = ((m.N + 127) / 128) * ((m.K + 127) / 128)
	case NVFP4:
		data, scale8, scale = m.N*m.K/2, m.N*m.K/16, 1
	default:
		return fmt.Errorf("kernels: %w: weight_fill: dtype %d", ErrInvalid, m.DType)
	}
	if len(m.Data) != data || len(m.Scale8) < scale8 || len(m.Scale) < scale {
		return fmt.Errorf("kernels: %w: weight_fill: [%d][%d] of dtype %d needs %d data bytes, %d e4m3 scales, %d scales; have %d, %d, %d",
			ErrInvalid, m.N, m.K, m.DType, data, scale8, scale, len(m.Data), len(m.Scale8), len(m.Scale))
	}
	return nil
}

// Weight is a packed [n][k] matrix.
type Weight struct {
	c    *C.rk_weight
	n, k int
}

// NewWeight returns an unfilled [n][k] weight, resident as FP32 or as BF16 values with FP32 scales.
func (d *Device) NewWeight(n, k int, f32 bool) (*Weight, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var isF32 C.int
	if f32 {
		isF32 = 1
	}
	w := C.rk_weight_new(d.c, C.int(n), C.int(k), isF32)
	if w == nil {
		return nil, statusError(C.RK_ENOMEM)
	}
	return &Weight{c: w, n: n, k: k}, nil
}

// Fill packs m into rows [row0, row0+m.N). Different rows may be filled by different goroutines at the same time.
func (w *Weight) Fill(row0 int, m Matrix) error {
	if err := m.lengths(); err != nil {
		return err
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	c := C.rk_matrix{dtype: C.rk_dtype(m.DType), n: C.int(m.N), k: C.int(m.K), scale_rows: C.int(m.ScaleRows)}
	pin.Pin(unsafe.SliceData(m.Data))
	c.data = unsafe.Pointer(unsafe.SliceData(m.Data))
	if len(m.Scale8) > 0 {
		pin.Pin(unsafe.SliceData(m.Scale8))
		c.scale8 = (*C.uint8_t)(unsafe.SliceData(m.Scale8))
	}
	c.scale = floats(&pin, m.Scale)
	return call(func() C.rk_status { return C.rk_weight_fill(w.c, C.int(row0), &c) })
}

// N is the number of outputs (rows).
func (w *Weight) N() int { return w.n }

// K is the number of inputs (columns).
func (w *Weight) K() int { return w.k }

// Bytes is the resident size, padding included.
func (w *Weight) Bytes() int { return int(C.rk_weight_bytes(w.c)) }

// Row returns row i dequantised, or nil when i is out of range.
func (w *Weight) Row(i int) []float32 {
	out := make([]float32, w.k)
	if C.rk_weight_row(w.c, C.int(i), (*C.float)(unsafe.SliceData(out))) != C.RK_OK {
		return nil
	}
	return out
}

// Free drops the caller's reference; plans that use the weight keep theirs.
func (w *Weight) Free() {
	if w.c != nil {
		C.rk_weight_free(w.c)
		w.c = nil
	}
}

// floats pins s and returns its C pointer (nil for an empty slice).
func floats(pin *runtime.Pinner, s []float32) *C.float {
	if len(s) == 0 {
		return nil
	}
	p := unsafe.SliceData(s)
	pin.Pin(p)
	return (*C.float)(p)
}

// KDASlotBytes is the size of one KDA layer's part of a state slot; 0 for a shape that is not supported.
func KDASlotBytes(heads, d, conv int, class Class) int {
	return int(C.rk_kda_slot_bytes(C.int(heads), C.int(d), C.int(conv), C.rk_class(class)))
}

// MLASlabBytes is the size of one MLA layer's part of a page (PageTokens positions); 0 for a shape that is not
// supported. indexDim 0 leaves the indexer's part out.
func MLASlabBytes(latent, indexDim, pool int, class Class) int {
	return int(C.rk_mla_slab_bytes(C.int(latent), C.int(indexDim), C.int(pool), C.rk_class(class)))
}
