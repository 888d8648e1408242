package main

import (
	"bufio"
	"net"
	"sync"
)

// bufferedConn lies below TLS and collects its records, 16 KiB each, to one system call for
// each chunk. What is written leaves with Flush, and before a read: during the handshake, the
// peer answers what was written.
type bufferedConn struct {
	net.Conn
	reader *bufio.Reader
	lock   sync.Mutex // of writer: answers and the alerts of TLS come from two goroutines
	writer *bufio.Writer
}

func newBufferedConn(raw net.Conn) *bufferedConn {
	return &bufferedConn{
		Conn:   raw,
		reader: bufio.NewReaderSize(raw, chunkSize),
		writer: bufio.NewWriterSize(raw, 2*chunkSize),
	}
}

func (c *bufferedConn) Read(data []byte) (int, error) {
	if err := c.Flush(); err != nil {
		return 0, err
	}
	return c.reader.Read(data)
}

func (c *bufferedConn) Write(data []byte) (int, error) {
	c.lock.Lock()
	defer c.lock.Unlock()
	return c.writer.Write(data)
}

func (c *bufferedConn) Flush() error {
	c.lock.Lock()
	defer c.lock.Unlock()
	return c.writer.Flush()
}
