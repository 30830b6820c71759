package tokenizer

// Byte-level vocabularies spell each byte as one printable character: printable Latin-1 bytes as themselves, the other 68 as
// U+0100 and up, in byte order.

var byteToRune, runeToByte = byteAlphabet()

func byteAlphabet() (to [256]rune, from map[rune]byte) {
	from = make(map[rune]byte, 256)
	next := rune(256)
	for b := 0; b < 256; b++ {
		r := rune(b)
		printable := b >= '!' && b <= '~' || b >= 0xa1 && b <= 0xac || b >= 0xae
		if !printable {
			r = next
			next++
		}
		to[b] = r
		from[r] = byte(b)
	}
	return to, from
}

// spellingBytes returns the bytes that a byte-level spelling stands for. A spelling with a character that stands for no byte
// is taken as plain text, as the reference's decoder takes it; ok is false then.
func spellingBytes(s string) (b []byte, ok bool) {
	b = make([]byte, 0, len(s))
	for _, r := range s {
		c, known := runeToByte[r]
		if !known {
			return []byte(s), false
		}
		b = append(b, c)
	}
	return b, true
}
