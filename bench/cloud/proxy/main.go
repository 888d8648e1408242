// s3proxy makes a local S3 server answer like a distant one.
//
//	s3proxy -target HOST:PORT -ca FILE
//
// It listens on a free port of loopback, speaks TLS with a certificate that it makes at its
// start (the root goes to FILE), and passes HTTP/1.1 on to the target, unencrypted: the
// target's processor time for TLS is then the proxy's. Three things differ from a wire:
//
//   - The first byte of an answer leaves no sooner than first_ms after the end of its request;
//     tail_share of the answers wait tail_ms instead. What the server takes is part of it.
//   - A connection carries mb_s at most in each direction (MB = 10^6 bytes).
//   - Above requests_per_s for all connections together, a request is answered 503 SlowDown
//     and does not reach the target.
//
// The first line of stdout is the port. Each line on stdin is a JSON object of settings that
// are to change, which may be empty; it is answered by a line of counts. The end of stdin ends
// the program, so it does not outlive what started it.
package main

import (
	"bufio"
	"crypto/tls"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"sync/atomic"
)

// Settings of the distance; zero means no delay and no limit.
type Settings struct {
	FirstMs        float64 `json:"first_ms"`
	TailShare      float64 `json:"tail_share"`
	TailMs         float64 `json:"tail_ms"`
	MBs            float64 `json:"mb_s"`
	RequestsPerSec float64 `json:"requests_per_s"`
}

// Counts since the start; MostOpen is since the line before.
type Counts struct {
	Connections int64 `json:"connections"`
	Open        int64 `json:"open"`
	MostOpen    int64 `json:"most_open"`
	Requests    int64 `json:"requests"`
	Refused     int64 `json:"refused"`
	SentBytes   int64 `json:"sent_bytes"` // of answers, to clients
}

// Proxy is what all connections share.
type Proxy struct {
	target   string
	settings atomic.Pointer[Settings]
	limit    rateLimit
	counts   Counts // changed by atomic operations only
}

func main() {
	target := flag.String("target", "", "host:port of the S3 server")
	authority := flag.String("ca", "", "file that gets the root certificate")
	flag.Parse()
	certificate, err := makeCertificate(*authority)
	if err != nil {
		log.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	proxy := &Proxy{target: *target}
	proxy.settings.Store(&Settings{})
	config := &tls.Config{
		Certificates: []tls.Certificate{certificate},
		// HTTP/2 is not offered, as S3 does not.
		NextProtos: []string{"http/1.1"},
		// Full records from the first byte on: the delay is ours to add.
		DynamicRecordSizingDisabled: true,
	}
	go proxy.accept(listener, config)
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	proxy.takeOrders()
}

// takeOrders returns at the end of stdin.
func (p *Proxy) takeOrders() {
	lines := bufio.NewScanner(os.Stdin)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		settings := *p.settings.Load()
		if err := json.Unmarshal(lines.Bytes(), &settings); err != nil {
			log.Fatal(err)
		}
		p.settings.Store(&settings)
		answers.Encode(p.takeCounts())
	}
}

func (p *Proxy) takeCounts() Counts {
	open := atomic.LoadInt64(&p.counts.Open)
	return Counts{
		Connections: atomic.LoadInt64(&p.counts.Connections),
		Open:        open,
		MostOpen:    atomic.SwapInt64(&p.counts.MostOpen, open),
		Requests:    atomic.LoadInt64(&p.counts.Requests),
		Refused:     atomic.LoadInt64(&p.counts.Refused),
		SentBytes:   atomic.LoadInt64(&p.counts.SentBytes),
	}
}

func (p *Proxy) accept(listener net.Listener, config *tls.Config) {
	for {
		connection, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go p.serve(connection, config)
	}
}

func (p *Proxy) serve(raw net.Conn, config *tls.Config) {
	atomic.AddInt64(&p.counts.Connections, 1)
	open := atomic.AddInt64(&p.counts.Open, 1)
	defer atomic.AddInt64(&p.counts.Open, -1)
	for {
		most := atomic.LoadInt64(&p.counts.MostOpen)
		if open <= most || atomic.CompareAndSwapInt64(&p.counts.MostOpen, most, open) {
			break
		}
	}
	defer raw.Close()
	wire := newBufferedConn(raw)
	client := tls.Server(wire, config)
	if client.Handshake() != nil || wire.Flush() != nil {
		return
	}
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	relay := &relay{proxy: p, client: client, wire: wire, server: server.(*net.TCPConn)}
	relay.run()
}
