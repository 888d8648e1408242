/* Answers requests about warm (cached) files without running Python code.
 *
 * An instance reads requests from a mount's /dev/fuse and answers the simple ones: OPEN of a
 * file that the kernel reads itself (passthrough), its RELEASE, GETATTR, READ of complete cache
 * files whose pages are in memory, GETXATTR of names that no file has here, and the IOCTL by
 * which Python's open() checks for a terminal. For each request it looks up the state of the
 * file in Python's own tables and objects. An unusual request is left to Python, in the buffer,
 * as if Python had read it. So Python has all rules, and this file repeats only those for the
 * usual, successful case.
 *
 * The effects of an OPEN or RELEASE on Python's tables are noted in a list, which Python takes
 * (`take`) before any other Python code runs. As with all requests, opens and closes are in the
 * journal before the kernel gets the reply (posix/journal/journal.py).
 *
 * All of this holds the interpreter lock, except polling, the only call that waits.
 */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the journal is written as little-endian numbers are stored"
#endif

/* Newer than the headers of some systems: Linux 6.9 and 6.6. */
#define RESENT (1ULL << 63)
#define PASSTHROUGH (1U << 7)
#define NOFLUSH (1U << 5)

enum {
    MOST_OPENED = 1024,    /* notes between two `take`s */
    MOST_TIMED = 256,      /* times between two `take`s */
    MOST_OPCODES = 64,
    MOST_NAMES = 16384,    /* as FileCache's MOST_NAMES */
    LONGEST_POLLED_NS = 500 * 1000, /* per `serve`, as other tasks wait meanwhile */
    LONGEST_READ = 64 << 10, /* longer READs are left to Python, to be copied without the lock */
    READ_AS_ONE = 4 << 10, /* a longer READ counts as several requests */
    ATTRIBUTES = 88,       /* struct fuse_attr as of FUSE 7.9 and later */
};
#define FOREVER_S (1ULL << 40) /* as in read_handlers.py */

/* The journal's records; see posix/journal/records.py. */
enum { OPEN_TYPE = 5, CLOSED_TYPE = 6, MODE_PASSTHROUGH = 1, FIRST_SLOT = 32, SLOT_SIZE = 16 };

struct __attribute__((packed)) open_record {
    uint16_t length, type;
    uint64_t unique, fh, nodeid;
    uint32_t flags;
    int32_t mode, backing_id;
};

struct __attribute__((packed)) closed_record {
    uint16_t length, type;
    uint64_t fh;
};

struct journal {
    PyObject *object; /* borrowed: NULL until a record is written */
    Py_buffer memory;
    uint64_t size, count, limit;
    uint32_t crc;
};

/* A note of an open, a close or both. `inode` is NULL for the close of a handle of Python's. */
struct opened {
    PyObject *inode, *file; /* owned */
    uint64_t unique, fh;
    int is_closed;
    uint32_t flags;
    int32_t backing_id;
};

struct timed {
    uint32_t opcode;
    double took_s;
};

/* The Python objects that `__init__` gets. */
#define FOR_EACH_OBJECT(X)                                                                        \
    X(operations) X(inodes) X(handles) X(open_files) X(restored) X(name_of) X(files)              \
    X(backing_ids)
#define MEMBER(name) PyObject *name;

typedef struct {
    PyObject_HEAD
    int fd;
    Py_buffer request, reply;
    FOR_EACH_OBJECT(MEMBER)
    long long checked_at_open; /* larger files are not compared with their checksums */
    PyObject *names; /* node id: (info, name of its cache file) */
    int can_read; /* the cache's file system supports RWF_NOWAIT */
    struct journal journal;
    PyObject *log; /* borrowed, during `serve` */
    uint64_t next_fh;
    int has_fh;
    /* The notes that Python has not taken yet. */
    uint64_t counts[MOST_OPCODES], refused[MOST_OPCODES], cache_bytes;
    int is_noted, lost;
    struct opened opened[MOST_OPENED];
    int opened_count;
    struct timed timed[MOST_TIMED];
    int timed_count;
    uint64_t untimed;
    long long period; /* one in this many requests is timed */
    unsigned long long requests;
    unsigned long long polled, hits, polled_ns; /* for busy_poll.py */
    int spent; /* the requests of one `serve`, long READs counted several times */
} FastPath;

static uint32_t crc_table[256];

/* The interned names of the attributes that are looked up. */
#define FOR_EACH_NAME(X)                                                                          \
    X(backing_id) X(count) X(crc) X(fd) X(fetched) X(file) X(info) X(inode) X(is_checked)         \
    X(is_current) X(is_removed) X(is_shut) X(limit) X(looked_up) X(memory) X(meta) X(next_fh)     \
    X(packed) X(present) X(readahead) X(served) X(size) X(staged) X(total)                        \
    X(valid_until) X(version)
#define DECLARE(name) static PyObject *s_##name;
FOR_EACH_NAME(DECLARE)

static const struct {
    PyObject **name;
    const char *text;
} interned[] = {
#define ENTRY(name) {&s_##name, #name},
    FOR_EACH_NAME(ENTRY)
};

/* Each function that looks something up or handles a request returns 1 for yes or done, 0 for no
 * or left to Python, -1 with an exception set, and REFUSED if an error was sent as the reply. */
enum { REFUSED = 2 };
#define TRY(expression)                                                                           \
    do {                                                                                          \
        int outcome_ = (expression);                                                              \
        if (outcome_ <= 0)                                                                        \
            return outcome_;                                                                      \
    } while (0)

static int is_object(PyObject *object, PyObject *name, PyObject *expected)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL)
        return -1;
    int is_it = found == expected;
    Py_DECREF(found);
    return is_it;
}

static int get_number(PyObject *object, PyObject *name, long long *value)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL)
        return -1;
    *value = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return *value == -1 && PyErr_Occurred() ? -1 : 1;
}

static int is_number(PyObject *object, PyObject *name, long long expected)
{
    long long value;
    TRY(get_number(object, name, &value));
    return value == expected;
}

static int get_seconds(PyObject *object, PyObject *name, double *value)
{
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL)
        return -1;
    *value = PyFloat_AsDouble(found);
    Py_DECREF(found);
    return *value == -1.0 && PyErr_Occurred() ? -1 : 1;
}

/* Look up a number in a dict; return a borrowed reference, or NULL (also with an exception set). */
static PyObject *by_number(PyObject *dict, uint64_t number)
{
    PyObject *key = PyLong_FromUnsignedLongLong(number);
    if (key == NULL)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(dict, key);
    Py_DECREF(key);
    return found;
}

static long long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Returns the same clock as time.monotonic(), in seconds. */
static double now_s(void)
{
    return 1e-9 * (double)now_ns();
}

/* The journal */

static uint32_t crc32_of(const unsigned char *data, size_t size, uint32_t crc)
{
    crc = ~crc;
    while (size--)
        crc = crc_table[(crc ^ *data++) & 0xff] ^ crc >> 8;
    return ~crc;
}

/* Open the journal for `append`; return 1 if it has room for one more record. */
static int open_journal(FastPath *self)
{
    struct journal *journal = &self->journal;
    if (self->log == Py_None)
        return 0; /* the journal was just turned off */
    if (journal->object == NULL) {
        long long size, count, limit, crc;
        TRY(get_number(self->log, s_size, &size));
        TRY(get_number(self->log, s_count, &count));
        TRY(get_number(self->log, s_limit, &limit));
        TRY(get_number(self->log, s_crc, &crc));
        PyObject *memory = PyObject_GetAttr(self->log, s_memory);
        if (memory == NULL)
            return -1;
        int failed = PyObject_GetBuffer(memory, &journal->memory, PyBUF_WRITABLE);
        Py_DECREF(memory);
        if (failed)
            return -1;
        journal->object = self->log;
        journal->size = (uint64_t)size;
        journal->count = (uint64_t)count;
        journal->limit = (uint64_t)limit;
        journal->crc = (uint32_t)crc;
    }
    uint64_t stop = journal->size + sizeof(struct open_record) + sizeof(uint32_t);
    return stop <= journal->limit && stop <= (uint64_t)journal->memory.len;
}

static int set_number(PyObject *object, PyObject *name, uint64_t value)
{
    PyObject *number = PyLong_FromUnsignedLongLong(value);
    if (number == NULL)
        return -1;
    int failed = PyObject_SetAttr(object, name, number);
    Py_DECREF(number);
    return failed ? -1 : 1;
}

static int close_journal(FastPath *self)
{
    struct journal *journal = &self->journal;
    PyObject *log = journal->object;
    if (log == NULL)
        return 1;
    journal->object = NULL;
    PyBuffer_Release(&journal->memory);
    TRY(set_number(log, s_size, journal->size));
    TRY(set_number(log, s_count, journal->count));
    return set_number(log, s_crc, journal->crc);
}

/* Append a record; call it only after `open_journal` has returned 1. */
static void append(FastPath *self, const void *record, size_t size)
{
    struct journal *journal = &self->journal;
    unsigned char *memory = journal->memory.buf;
    journal->crc = crc32_of(record, size, journal->crc);
    memcpy(memory + journal->size, record, size);
    memcpy(memory + journal->size + size, &journal->crc, sizeof journal->crc);
    journal->size += size + sizeof journal->crc;
    journal->count++;
    /* The record is written before the commit, whose two numbers take one instruction each. */
    unsigned char *slot = memory + FIRST_SLOT + (journal->count & 1) * SLOT_SIZE;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    *(volatile uint64_t *)slot = journal->size;
    *(volatile uint32_t *)(slot + 8) = journal->crc;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/* Replies */

static void reply(FastPath *self, const struct fuse_in_header *request, int error, void *body,
                  size_t size)
{
    struct fuse_out_header header = {
        .len = (uint32_t)(sizeof header + size), .error = error, .unique = request->unique};
    struct iovec parts[] = {{&header, sizeof header}, {body, size}};
    if (writev(self->fd, parts, size ? 2 : 1) < 0)
        self->lost = errno;
}

static int refuse(FastPath *self, const struct fuse_in_header *request, int error)
{
    reply(self, request, -error, NULL, 0);
    return REFUSED;
}

/* Send a reply whose body is already in `self->reply`, after the space for the header. */
static void reply_in_place(FastPath *self, const struct fuse_in_header *request, size_t size)
{
    struct fuse_out_header *header = self->reply.buf;
    *header = (struct fuse_out_header){.len = (uint32_t)(sizeof *header + size),
                                       .unique = request->unique};
    if (write(self->fd, header, sizeof *header + size) < 0)
        self->lost = errno;
}

/* OPEN */

static int is_valid(PyObject *inode)
{
    int is_looked_up = is_object(inode, s_looked_up, Py_True);
    if (is_looked_up)
        return is_looked_up;
    double until;
    TRY(get_seconds(inode, s_valid_until, &until));
    return until > now_s();
}

/* Find the name of the cache file of a node's version; borrowed, or NULL with an exception. */
static PyObject *find_name(FastPath *self, PyObject *nodeid, PyObject *info)
{
    PyObject *known = PyDict_GetItemWithError(self->names, nodeid);
    if (known != NULL && PyTuple_GET_ITEM(known, 0) == info)
        return PyTuple_GET_ITEM(known, 1);
    if (PyErr_Occurred())
        return NULL;
    PyObject *version = PyObject_GetAttr(info, s_version);
    if (version == NULL)
        return NULL;
    PyObject *name = PyObject_CallOneArg(self->name_of, version);
    Py_DECREF(version);
    if (name == NULL)
        return NULL;
    if (PyDict_GET_SIZE(self->names) >= MOST_NAMES)
        PyDict_Clear(self->names);
    known = PyTuple_Pack(2, info, name);
    Py_DECREF(name);
    if (known == NULL)
        return NULL;
    int failed = PyDict_SetItem(self->names, nodeid, known);
    Py_DECREF(known); /* the dict holds a reference */
    return failed ? NULL : name;
}

/* Return 1 if the node is its name's current one and is not being written, and if no handle of it
 * is served by the daemon (which would exclude passthrough). */
static int is_plain(FastPath *self, PyObject *inode)
{
    TRY(is_object(self->operations, s_is_shut, Py_False));
    TRY(is_object(inode, s_is_current, Py_True));
    TRY(is_object(inode, s_staged, Py_None));
    return is_number(inode, s_served, 0);
}

static int is_whole(PyObject *file)
{
    long long size, total;
    TRY(get_number(file, s_size, &size));
    PyObject *present = PyObject_GetAttr(file, s_present);
    if (present == NULL)
        return -1;
    int found = get_number(present, s_total, &total);
    Py_DECREF(present);
    TRY(found);
    return size > 0 && size == total;
}

/* Return 1 if a file need not be compared with its checksums before it is opened. */
static int is_compared(FastPath *self, PyObject *file)
{
    long long size;
    TRY(get_number(file, s_size, &size));
    return size > self->checked_at_open ? 1 : is_object(file, s_is_checked, Py_True);
}

/* Find the complete cache file that the kernel reads for a node (borrowed), and its backing id. */
static int find_backing(FastPath *self, PyObject *nodeid, PyObject *info, PyObject **file,
                        int32_t *backing_id)
{
    PyObject *name = find_name(self, nodeid, info);
    if (name == NULL)
        return -1;
    *file = PyDict_GetItemWithError(self->files, name);
    if (*file == NULL)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *id = PyDict_GetItemWithError(self->backing_ids, *file);
    if (id == NULL)
        return PyErr_Occurred() ? -1 : 0;
    long number = PyLong_AsLong(id);
    if (number == -1 && PyErr_Occurred())
        return -1;
    *backing_id = (int32_t)number;
    TRY(number > 0);
    TRY(is_whole(*file));
    return is_compared(self, *file);
}

static int open_with(FastPath *self, const struct fuse_in_header *request, uint32_t flags,
                     PyObject *nodeid, PyObject *inode, PyObject *info)
{
    PyObject *file;
    int32_t backing_id;
    TRY(info != Py_None);
    TRY(find_backing(self, nodeid, info, &file, &backing_id));
    TRY(open_journal(self));
    if (!self->has_fh) {
        long long next;
        TRY(get_number(self->handles, s_next_fh, &next));
        self->next_fh = (uint64_t)next;
        self->has_fh = 1;
    }
    if (PyObject_SetAttr(inode, s_looked_up, Py_False) < 0)
        return -1;
    uint64_t fh = self->next_fh++;
    struct open_record record = {
        .length = sizeof record - 4,
        .type = OPEN_TYPE,
        .unique = request->unique,
        .fh = fh,
        .nodeid = request->nodeid,
        .flags = flags,
        .mode = MODE_PASSTHROUGH,
        .backing_id = backing_id,
    };
    append(self, &record, sizeof record);
    self->opened[self->opened_count++] = (struct opened){
        .inode = Py_NewRef(inode),
        .file = Py_NewRef(file),
        .unique = request->unique,
        .fh = fh,
        .flags = flags,
        .backing_id = backing_id,
    };
    struct {
        uint64_t fh;
        uint32_t flags;
        int32_t backing_id;
    } answer = {fh, NOFLUSH | PASSTHROUGH, backing_id};
    reply(self, request, 0, &answer, sizeof answer);
    return 1;
}

static int open_file(FastPath *self, const struct fuse_in_header *request, const char *body)
{
    const struct fuse_open_in *in = (const void *)body;
    if (in->flags & (O_WRONLY | O_RDWR | O_TRUNC) || self->opened_count == MOST_OPENED)
        return 0;
    if (PyDict_GET_SIZE(self->restored)) {
        PyObject *known = by_number(self->restored, request->unique);
        if (known != NULL || PyErr_Occurred())
            return known != NULL ? 0 : -1;
    }
    PyObject *nodeid = PyLong_FromUnsignedLongLong(request->nodeid);
    if (nodeid == NULL)
        return -1;
    PyObject *inode = PyDict_GetItemWithError(self->inodes, nodeid), *info = NULL;
    int outcome = inode != NULL ? 1 : PyErr_Occurred() ? -1 : 0;
    if (outcome > 0)
        outcome = is_plain(self, inode);
    if (outcome > 0)
        outcome = is_valid(inode);
    if (outcome > 0) {
        info = PyObject_GetAttr(inode, s_info);
        outcome = info == NULL ? -1 : open_with(self, request, in->flags, nodeid, inode, info);
    }
    Py_XDECREF(info);
    Py_DECREF(nodeid);
    return outcome;
}

/* RELEASE of a passthrough handle */

static void log_close(FastPath *self, const struct fuse_in_header *request, uint64_t fh)
{
    struct closed_record record = {.length = sizeof record - 4, .type = CLOSED_TYPE, .fh = fh};
    append(self, &record, sizeof record);
    reply(self, request, 0, NULL, 0);
}

/* Find the note of the open that returned handle `fh`; NULL if Python has taken it. */
static struct opened *find_note(FastPath *self, uint64_t fh)
{
    for (int at = self->opened_count; at--;)
        if (self->opened[at].fh == fh)
            return &self->opened[at];
    return NULL;
}

/* Return 1 if the file of a handle in Python's table is not being written. */
static int is_unwritten(PyObject *handle)
{
    PyObject *inode = PyObject_GetAttr(handle, s_inode);
    if (inode == NULL)
        return -1;
    int outcome = is_object(inode, s_staged, Py_None);
    Py_DECREF(inode);
    return outcome;
}

static int release(FastPath *self, const struct fuse_in_header *request, const char *body)
{
    uint64_t fh = ((const struct fuse_release_in *)body)->fh;
    struct opened *note = find_note(self, fh);
    if (note != NULL) {
        if (note->is_closed)
            return 0;
        TRY(open_journal(self));
        note->is_closed = 1;
        log_close(self, request, fh);
        return 1;
    }
    PyObject *handle = by_number(self->open_files, fh);
    if (handle == NULL)
        return PyErr_Occurred() ? -1 : 0;
    long long backing_id;
    TRY(self->opened_count < MOST_OPENED);
    TRY(is_unwritten(handle));
    TRY(get_number(handle, s_backing_id, &backing_id));
    TRY(backing_id != 0); /* only passthrough handles have a backing id */
    TRY(open_journal(self));
    PyObject *file = PyObject_GetAttr(handle, s_file);
    if (file == NULL)
        return -1;
    note = &self->opened[self->opened_count++];
    *note = (struct opened){.file = file, .fh = fh, .is_closed = 1};
    log_close(self, request, fh);
    return 1;
}

/* GETATTR */

static int get_attributes(FastPath *self, const struct fuse_in_header *request)
{
    PyObject *inode = by_number(self->inodes, request->nodeid);
    if (inode == NULL)
        return PyErr_Occurred() ? -1 : 0;
    TRY(is_object(inode, s_staged, Py_None));
    TRY(is_object(inode, s_is_removed, Py_False));
    /* If the metadata is unknown, Python may have to send a HEAD for the object. */
    int is_unknown = is_object(inode, s_meta, Py_None);
    if (is_unknown)
        return is_unknown < 0 ? -1 : 0;
    struct {
        uint64_t seconds;
        uint32_t rest, padding;
        char attributes[ATTRIBUTES];
    } answer = {0};
    int is_directory = is_object(inode, s_info, Py_None);
    if (is_directory < 0)
        return -1;
    if (is_directory)
        answer.seconds = FOREVER_S;
    else {
        double until;
        TRY(get_seconds(inode, s_valid_until, &until));
        double left = until - now_s();
        if (left >= (double)FOREVER_S)
            answer.seconds = FOREVER_S;
        else if (left > 0) {
            answer.seconds = (uint64_t)left;
            answer.rest = (uint32_t)((left - floor(left)) * 1e9);
        }
    }
    PyObject *packed = PyObject_GetAttr(inode, s_packed);
    if (packed == NULL)
        return -1;
    int is_there = PyBytes_CheckExact(packed) && PyBytes_GET_SIZE(packed) == ATTRIBUTES;
    if (is_there)
        memcpy(answer.attributes, PyBytes_AS_STRING(packed), ATTRIBUTES);
    Py_DECREF(packed);
    if (is_there)
        reply(self, request, 0, &answer, sizeof answer);
    return is_there;
}

/* READ */

/* Answer a READ of a complete file from the page cache, or leave it to Python. */
static int read_whole(FastPath *self, const struct fuse_in_header *request,
                      const struct fuse_read_in *in, PyObject *file)
{
    long long fd, size;
    TRY(is_whole(file));
    TRY(get_number(file, s_fd, &fd));
    TRY(get_number(file, s_size, &size));
    TRY(fd >= 0);
    uint64_t left = in->offset < (uint64_t)size ? (uint64_t)size - in->offset : 0;
    size_t wanted = left < in->size ? (size_t)left : in->size;
    if (wanted) {
        char *data = (char *)self->reply.buf + sizeof(struct fuse_out_header);
        struct iovec part = {data, wanted};
        ssize_t count = preadv2((int)fd, &part, 1, (off_t)in->offset, RWF_NOWAIT);
        if (count < 0 && errno == EOPNOTSUPP)
            self->can_read = 0; /* without RWF_NOWAIT the read might wait for the disk */
        TRY(count == (ssize_t)wanted);
    }
    self->spent += (int)(wanted / READ_AS_ONE);
    self->cache_bytes += wanted;
    reply_in_place(self, request, wanted);
    return 1;
}

static int read_file(FastPath *self, const struct fuse_in_header *request, const char *body)
{
    const struct fuse_read_in *in = (const void *)body;
    if (in->size > LONGEST_READ || !self->can_read)
        return 0;
    TRY(is_object(self->operations, s_is_shut, Py_False));
    PyObject *handle = by_number(self->open_files, in->fh);
    if (handle == NULL)
        return PyErr_Occurred() ? -1 : 0;
    TRY(is_object(handle, s_readahead, Py_None));
    TRY(is_number(handle, s_fetched, 0));
    TRY(is_unwritten(handle));
    PyObject *file = PyObject_GetAttr(handle, s_file);
    if (file == NULL)
        return -1;
    int outcome = read_whole(self, request, in, file);
    Py_DECREF(file);
    return outcome;
}

/* GETXATTR */

/* Files have only `user.` attributes (xattrs.py). `ls -l` asks for other attributes as well. */
static int get_attribute(FastPath *self, const struct fuse_in_header *request, const char *name,
                         size_t size)
{
    static const char kept[] = "user.";
    if (size > strlen(kept) && memcmp(name, kept, strlen(kept)) == 0)
        return 0;
    return refuse(self, request, ENODATA);
}

/* One request */

static int answer(FastPath *self, size_t size)
{
    const struct fuse_in_header *request = self->request.buf;
    const char *body = (const char *)(request + 1);
    if (size < sizeof *request || request->unique & RESENT)
        return 0;
    size_t left = size - sizeof *request;
    switch (request->opcode) {
    case FUSE_OPEN:
        return left < sizeof(struct fuse_open_in) ? 0 : open_file(self, request, body);
    case FUSE_RELEASE:
        return left < sizeof(struct fuse_release_in) ? 0 : release(self, request, body);
    case FUSE_GETATTR:
        return get_attributes(self, request);
    case FUSE_READ:
        return left < sizeof(struct fuse_read_in) ? 0 : read_file(self, request, body);
    case FUSE_GETXATTR:
        return left <= sizeof(struct fuse_getxattr_in)
                   ? 0
                   : get_attribute(self, request, body + sizeof(struct fuse_getxattr_in),
                                   left - sizeof(struct fuse_getxattr_in));
    case FUSE_IOCTL:
        return refuse(self, request, ENOTTY);
    default:
        return 0;
    }
}

static void count(FastPath *self, uint32_t opcode, int handled, double began)
{
    self->requests++;
    self->is_noted = 1;
    if (handled == REFUSED) {
        self->refused[opcode]++;
        return;
    }
    self->counts[opcode]++;
    if (began && self->timed_count < MOST_TIMED)
        self->timed[self->timed_count++] = (struct timed){opcode, now_s() - began};
}

/* Python's side */

static ssize_t read_request(FastPath *self)
{
    return read(self->fd, self->request.buf, (size_t)self->request.len);
}

/* Poll for a request for up to `longest_ns`, and let other threads run meanwhile. */
static ssize_t poll_request(FastPath *self, long long longest_ns)
{
    ssize_t size;
    int error;
    long long took;
    Py_BEGIN_ALLOW_THREADS;
    long long began = now_ns();
    do {
        size = read_request(self);
        error = errno;
        took = now_ns() - began;
    } while (size < 0 && error == EAGAIN && took < longest_ns);
    Py_END_ALLOW_THREADS;
    self->polled++;
    self->hits += size >= 0;
    self->polled_ns += (unsigned long long)took;
    errno = error;
    return size;
}

static int serve_some(FastPath *self, int most, long long poll_ns, Py_ssize_t *outcome)
{
    unsigned long long polled_until = self->polled_ns + LONGEST_POLLED_NS;
    for (; self->spent < most && self->timed_count < MOST_TIMED; self->spent++) {
        ssize_t size = read_request(self);
        if (size < 0 && errno == EAGAIN && poll_ns) {
            if (self->polled_ns >= polled_until)
                break; /* polling pays, but other tasks must run now */
            size = poll_request(self, poll_ns);
        }
        if (size < 0) {
            if (errno == ENOENT || errno == EINTR)
                continue; /* the request was interrupted before it could be read */
            *outcome = -errno;
            return 1;
        }
        double began = 0;
        if ((long long)++self->untimed >= self->period) {
            self->untimed = 0;
            began = now_s();
        }
        uint32_t opcode = ((const struct fuse_in_header *)self->request.buf)->opcode;
        int handled = answer(self, (size_t)size);
        if (handled <= 0) {
            *outcome = size;
            return handled < 0 ? -1 : 1;
        }
        count(self, opcode, handled, began);
    }
    *outcome = 0;
    return 1;
}

/* serve(log, most, poll_ns): answer up to `most` requests, and poll up to `poll_ns` for each.
 * Returns the size of a request that is left to Python, 0 if other tasks must run now, or a
 * negative errno of `read`: -EAGAIN if there is no request. */
static PyObject *serve(FastPath *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "serve(log, most, poll_ns)");
        return NULL;
    }
    long most = PyLong_AsLong(arguments[1]), poll_ns = PyLong_AsLong(arguments[2]);
    if ((most == -1 || poll_ns == -1) && PyErr_Occurred())
        return NULL;
    Py_ssize_t outcome = 0;
    self->log = arguments[0];
    self->spent = 0;
    PyObject *type, *value, *trace;
    (void)serve_some(self, (int)most, poll_ns, &outcome);
    PyErr_Fetch(&type, &value, &trace);
    int failed = close_journal(self) < 0;
    if (self->has_fh) {
        self->has_fh = 0;
        failed |= set_number(self->handles, s_next_fh, self->next_fh) < 0;
    }
    self->log = NULL;
    if (type != NULL)
        PyErr_Restore(type, value, trace);
    return failed || type != NULL ? NULL : PyLong_FromSsize_t(outcome);
}

static PyObject *take_counts(uint64_t by_opcode[MOST_OPCODES])
{
    PyObject *counts = PyList_New(0);
    for (int opcode = 0; counts != NULL && opcode < MOST_OPCODES; opcode++) {
        if (!by_opcode[opcode])
            continue;
        PyObject *item = Py_BuildValue("iK", opcode, (unsigned long long)by_opcode[opcode]);
        if (item == NULL || PyList_Append(counts, item) < 0)
            Py_CLEAR(counts);
        Py_XDECREF(item);
        by_opcode[opcode] = 0;
    }
    return counts;
}

static PyObject *take_timed(FastPath *self)
{
    PyObject *timed = PyList_New(self->timed_count);
    for (int at = 0; timed != NULL && at < self->timed_count; at++) {
        struct timed *one = &self->timed[at];
        PyObject *item = Py_BuildValue("Id", one->opcode, one->took_s);
        if (item == NULL)
            Py_CLEAR(timed);
        else
            PyList_SET_ITEM(timed, at, item);
    }
    self->timed_count = 0;
    return timed;
}

static PyObject *take_opened(FastPath *self)
{
    PyObject *opened = PyList_New(self->opened_count);
    for (int at = 0; at < self->opened_count; at++) {
        struct opened *one = &self->opened[at];
        PyObject *item = NULL;
        if (opened != NULL)
            item = Py_BuildValue("OOKiIKi", one->inode != NULL ? one->inode : Py_None, one->file,
                                 (unsigned long long)one->fh, one->backing_id, one->flags, (unsigned long long)one->unique,
                                 one->is_closed);
        Py_CLEAR(one->inode);
        Py_CLEAR(one->file);
        if (item == NULL)
            Py_CLEAR(opened);
        else
            PyList_SET_ITEM(opened, at, item);
    }
    self->opened_count = 0;
    return opened;
}

/* take(): return and clear the notes since the last call, or None if no request was answered. A
 * tuple of: answered requests as [(opcode, count)]; times as [(opcode, seconds)]; opens as [(inode,
 * file, fh, backing id, flags, unique, 1 if closed)], with None as inode if only the close is new;
 * bytes read; requests answered with an error as [(opcode, count)]; errno of a lost reply or 0. */
static PyObject *take(FastPath *self, PyObject *Py_UNUSED(ignored))
{
    if (!self->is_noted)
        Py_RETURN_NONE;
    PyObject *counts = take_counts(self->counts), *refused = take_counts(self->refused);
    PyObject *timed = take_timed(self), *opened = take_opened(self);
    if (counts == NULL || refused == NULL || timed == NULL || opened == NULL) {
        Py_XDECREF(counts);
        Py_XDECREF(refused);
        Py_XDECREF(timed);
        Py_XDECREF(opened);
        return NULL;
    }
    PyObject *taken = Py_BuildValue("NNNKNi", counts, timed, opened,
                                    (unsigned long long)self->cache_bytes, refused, self->lost);
    self->cache_bytes = 0;
    self->is_noted = self->lost = 0;
    return taken;
}

static int init(FastPath *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {
        "fd",         "request", "reply", "operations",  "inodes",    "handles",
        "open_files", "restored", "name_of", "files",    "backing_ids", "checked_at_open",
        NULL};
    FOR_EACH_OBJECT(MEMBER)
    if (self->names != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "made already");
        return -1;
    }
    Py_buffer request = {0}, reply = {0};
    if (!PyArg_ParseTupleAndKeywords(
            args, keywords, "iw*w*OO!OO!O!OO!O!L", names, &self->fd, &request, &reply,
            &operations, &PyDict_Type, &inodes, &handles, &PyDict_Type, &open_files, &PyDict_Type,
            &restored, &name_of, &PyDict_Type, &files, &PyDict_Type, &backing_ids,
            &self->checked_at_open))
        return -1;
    self->request = request;
    self->reply = reply;
#define KEEP(name) self->name = Py_NewRef(name);
    FOR_EACH_OBJECT(KEEP)
    self->can_read = 1;
    self->period = 1;
    self->names = PyDict_New();
    if (self->names == NULL)
        return -1;
    if (reply.len < (Py_ssize_t)(LONGEST_READ + sizeof(struct fuse_out_header)) ||
        request.len < FUSE_MIN_READ_BUFFER) {
        PyErr_SetString(PyExc_ValueError, "a buffer is too small");
        return -1;
    }
    return 0;
}

static int traverse(FastPath *self, visitproc visit, void *arg)
{
#define VISIT(name) Py_VISIT(self->name);
    FOR_EACH_OBJECT(VISIT)
    Py_VISIT(self->names);
    for (int at = 0; at < self->opened_count; at++) {
        Py_VISIT(self->opened[at].inode);
        Py_VISIT(self->opened[at].file);
    }
    return 0;
}

static int clear(FastPath *self)
{
#define CLEAR(name) Py_CLEAR(self->name);
    FOR_EACH_OBJECT(CLEAR)
    Py_CLEAR(self->names);
    while (self->opened_count) {
        struct opened *last = &self->opened[--self->opened_count];
        Py_CLEAR(last->inode);
        Py_CLEAR(last->file);
    }
    return 0;
}

static void dealloc(FastPath *self)
{
    PyObject_GC_UnTrack(self);
    clear(self);
    if (self->request.obj != NULL)
        PyBuffer_Release(&self->request);
    if (self->reply.obj != NULL)
        PyBuffer_Release(&self->reply);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef methods[] = {
    {"serve", (PyCFunction)(void (*)(void))serve, METH_FASTCALL, NULL},
    {"take", (PyCFunction)take, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"requests", T_ULONGLONG, offsetof(FastPath, requests), READONLY, "requests answered here"},
    {"spent", T_INT, offsetof(FastPath, spent), READONLY, "the last `serve`'s share of `most`"},
    {"polled", T_ULONGLONG, offsetof(FastPath, polled), READONLY, "waits that were polled"},
    {"hits", T_ULONGLONG, offsetof(FastPath, hits), READONLY, "polled waits with a request"},
    {"polled_ns", T_ULONGLONG, offsetof(FastPath, polled_ns), READONLY, "time spent on polling"},
    {"period", T_LONGLONG, offsetof(FastPath, period), 0, "one of this many requests is timed"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject FastPathType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fusefs.fuse._fast_path.FastPath",
    .tp_basicsize = sizeof(FastPath),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Answers requests about one mount's warm (cached) files.",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)init,
    .tp_dealloc = (destructor)dealloc,
    .tp_traverse = (traverseproc)traverse,
    .tp_clear = (inquiry)clear,
    .tp_methods = methods,
    .tp_members = members,
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_fast_path",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__fast_path(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? crc >> 1 ^ 0xEDB88320 : crc >> 1;
        crc_table[byte] = crc;
    }
    for (size_t at = 0; at < sizeof interned / sizeof *interned; at++) {
        *interned[at].name = PyUnicode_InternFromString(interned[at].text);
        if (*interned[at].name == NULL)
            return NULL;
    }
    if (PyType_Ready(&FastPathType) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    if (made == NULL)
        return NULL;
    if (PyModule_AddObjectRef(made, "FastPath", (PyObject *)&FastPathType) < 0)
        Py_CLEAR(made);
    return made;
}
