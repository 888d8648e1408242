package main

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// Large enough that system calls and wake-ups cost little beside the bytes, and small
	// enough that a connection's pace is even: 3 ms at 90 MB/s.
	chunkSize   = 256 << 10
	maxHeadSize = 64 << 10
)

var errBadRequest = errors.New("not a request that the proxy understands")

// relay is one connection of a client with the one to the server behind it. The requests are
// framed, to know when one ends and whether it may pass; the answers are only passed on, the
// first bytes after a request being the begin of its answer (no client of S3 pipelines).
type relay struct {
	proxy  *Proxy
	client *tls.Conn
	wire   *bufferedConn
	server *net.TCPConn

	// The end of the latest request that has no answer yet, in nanoseconds since 1970; 0 for none.
	unanswered atomic.Int64
}

func (r *relay) run() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.passAnswers()
		// A client that waits to send on notices that its answers have ended.
		r.wire.Close()
	}()
	r.passRequests()
	r.server.CloseWrite()
	<-done
}

// --- answers ---

func (r *relay) passAnswers() {
	buffer := make([]byte, chunkSize)
	var pace pace
	for {
		count, err := r.server.Read(buffer)
		if count > 0 {
			if ended := r.unanswered.Swap(0); ended != 0 {
				r.waitForFirstByte(ended)
				pace.begin()
			}
			if r.send(buffer[:count]) != nil {
				return
			}
			atomic.AddInt64(&r.proxy.counts.SentBytes, int64(count))
			pace.wait(count, r.proxy.settings.Load().MBs)
		}
		if err != nil {
			return
		}
	}
}

func (r *relay) send(data []byte) error {
	if _, err := r.client.Write(data); err != nil {
		return err
	}
	return r.wire.Flush()
}

func (r *relay) waitForFirstByte(ended int64) {
	settings := r.proxy.settings.Load()
	delay := settings.FirstMs
	if rand.Float64() < settings.TailShare {
		delay = settings.TailMs
	}
	time.Sleep(time.Until(time.Unix(0, ended).Add(time.Duration(delay * float64(time.Millisecond)))))
}

// --- requests ---

func (r *relay) passRequests() {
	reader := bufio.NewReaderSize(r.client, chunkSize)
	var pace pace
	for {
		request, err := readHead(reader)
		if err != nil {
			return
		}
		atomic.AddInt64(&r.proxy.counts.Requests, 1)
		settings := r.proxy.settings.Load()
		if !r.proxy.limit.take(settings.RequestsPerSec) {
			atomic.AddInt64(&r.proxy.counts.Refused, 1)
			if r.refuse(reader, request) != nil {
				return
			}
			continue
		}
		if r.forward(reader, request, &pace) != nil {
			return
		}
	}
}

// forward passes one request on. The time of its end is set before its last bytes leave, so
// that no answer can come before it. What the server sends earlier, as `100 Continue`, is
// passed on at once.
func (r *relay) forward(reader *bufio.Reader, request *head, pace *pace) error {
	pace.begin()
	if request.size == 0 {
		r.unanswered.Store(time.Now().UnixNano())
	}
	if _, err := r.server.Write(request.raw); err != nil {
		return err
	}
	if request.isChunked {
		return r.forwardChunks(reader, pace)
	}
	return r.forwardBytes(reader, request.size, true, pace)
}

// forwardBytes passes a body on, or a part of one.
func (r *relay) forwardBytes(reader *bufio.Reader, left int64, isLast bool, pace *pace) error {
	for left > 0 {
		count := min(left, chunkSize/4)
		data, err := reader.Peek(int(count))
		if err != nil {
			return err
		}
		if left -= count; left == 0 && isLast {
			r.unanswered.Store(time.Now().UnixNano())
		}
		if _, err := r.server.Write(data); err != nil {
			return err
		}
		reader.Discard(int(count))
		pace.wait(int(count), r.proxy.settings.Load().MBs)
	}
	return nil
}

// forwardChunks passes a chunked body on: RFC 9112, section 7.1.
func (r *relay) forwardChunks(reader *bufio.Reader, pace *pace) error {
	for {
		line, err := reader.ReadBytes('\n')
		if err != nil {
			return err
		}
		digits, _, _ := bytes.Cut(bytes.TrimSpace(line), []byte(";"))
		size, err := strconv.ParseInt(string(digits), 16, 64)
		if err != nil {
			return err
		}
		if _, err := r.server.Write(line); err != nil {
			return err
		}
		if size == 0 {
			return r.forwardTrailers(reader)
		}
		if err := r.forwardBytes(reader, size+2, false, pace); err != nil {
			return err
		}
	}
}

func (r *relay) forwardTrailers(reader *bufio.Reader) error {
	for {
		line, err := reader.ReadBytes('\n')
		if err != nil {
			return err
		}
		isLast := len(bytes.TrimSpace(line)) == 0
		if isLast {
			r.unanswered.Store(time.Now().UnixNano())
		}
		if _, err := r.server.Write(line); err != nil || isLast {
			return err
		}
	}
}

const slowDown = `<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>`

// refuse answers 503 SlowDown as S3 does, with the delay of any answer, and keeps the
// connection if nothing of the request is left to read.
func (r *relay) refuse(reader *bufio.Reader, request *head) error {
	isKept := request.size == 0
	connection := "keep-alive"
	if !isKept {
		connection = "close"
	}
	body := slowDown
	if request.method == "HEAD" {
		body = ""
	}
	r.waitForFirstByte(time.Now().UnixNano())
	answer := fmt.Sprintf("HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\n"+
		"Connection: %s\r\nContent-Length: %d\r\n\r\n%s", connection, len(slowDown), body)
	if err := r.send([]byte(answer)); err != nil {
		return err
	}
	if !isKept {
		r.client.CloseWrite()
		r.wire.Flush()
		// Closing with unread bytes would reset the connection, and the answer be lost.
		r.wire.SetReadDeadline(time.Now().Add(time.Second))
		io.Copy(io.Discard, reader)
		return errBadRequest
	}
	return nil
}

// head is a request's first line and header fields; size is the body's, -1 for a chunked one.
type head struct {
	raw       []byte
	method    string
	size      int64
	isChunked bool
}

func readHead(reader *bufio.Reader) (*head, error) {
	request := &head{}
	for {
		line, err := reader.ReadSlice('\n')
		if err != nil {
			return nil, err
		}
		request.raw = append(request.raw, line...)
		if len(request.raw) > maxHeadSize {
			return nil, errBadRequest
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return request, nil
		}
		if request.method == "" {
			method, _, _ := bytes.Cut(line, []byte(" "))
			request.method = string(method)
			continue
		}
		if err := request.readField(line); err != nil {
			return nil, err
		}
	}
}

func (h *head) readField(line []byte) error {
	name, value, _ := bytes.Cut(line, []byte(":"))
	value = bytes.TrimSpace(value)
	var err error
	switch {
	case bytes.EqualFold(name, []byte("Content-Length")):
		h.size, err = strconv.ParseInt(string(value), 10, 64)
	case bytes.EqualFold(name, []byte("Transfer-Encoding")):
		h.size, h.isChunked = -1, true
	}
	return err
}

// --- limits ---

// pace keeps one direction of a connection to its rate. A wait that the system made too long
// is made up for, up to maxCredit.
type pace struct {
	next time.Time
}

const maxCredit = 10 * time.Millisecond

// begin forgets the pause before a message: an idle connection saves nothing up.
func (p *pace) begin() {
	if now := time.Now(); p.next.Before(now) {
		p.next = now
	}
}

// wait returns when the bytes that have just been sent have taken their time.
func (p *pace) wait(count int, mbPerSec float64) {
	if mbPerSec == 0 {
		return
	}
	now := time.Now()
	if oldest := now.Add(-maxCredit); p.next.Before(oldest) {
		p.next = oldest
	}
	p.next = p.next.Add(time.Duration(float64(count) / mbPerSec * 1000))
	if left := p.next.Sub(now); left > 0 {
		time.Sleep(left)
	}
}

// rateLimit lets through so many requests a second, after a pause a quarter of a second's at once.
type rateLimit struct {
	sync.Mutex
	tokens float64
	last   time.Time
}

func (l *rateLimit) take(perSec float64) bool {
	if perSec == 0 {
		return true
	}
	l.Lock()
	defer l.Unlock()
	now := time.Now()
	l.tokens = min(l.tokens+now.Sub(l.last).Seconds()*perSec, perSec/4)
	l.last = now
	if l.tokens < 1 {
		return false
	}
	l.tokens--
	return true
}
