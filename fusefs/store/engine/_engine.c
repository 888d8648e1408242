/* HTTP requests by libcurl in worker threads, which never hold the interpreter lock.
 *
 * Python gives each request to a worker (`submit`), which sends it, writes the answer's body to the
 * request's sink, and lists the transfer for Python. An eventfd tells the event loop that there is
 * something to `collect`. Each worker has a curl multi handle with connections of its own. A thread
 * of Python's calls `run`, which does the work. engine.py is the Python side.
 *
 * Threads: a transfer belongs to Python until it is queued, then to its worker, and to Python again
 * once it is listed as complete. The worker's mutex guards the queue and the list. It is held for a
 * few instructions, and no Python code runs meanwhile. The thread touches no Python object; a
 * transfer holds references to its handle and its owner from `submit` to `collect`.
 *
 * libcurl (https://curl.se/libcurl/c/threadsafe.html): a multi handle and its easy handles may be
 * used by one thread only. Other threads may call only curl_multi_wakeup. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <structmember.h>

#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "crc.h"

#if LIBCURL_VERSION_NUM < 0x075700 /* CURLOPT_QUICK_EXIT */
#error "fusefs needs libcurl 7.87 or newer"
#endif

enum {
    MOST_HEAD = 64 << 10,    /* headers of an answer and of the 1xx answers before it */
    MOST_DOCUMENT = 1 << 20, /* the body of an answer that is not 2xx */
    GATHERED = 256 << 10, /* larger writes than TLS's records (16 KiB) make larger folios */
    FIRST = 64 << 10, /* the beginning is written and reported at this size */
    SENT_AT_ONCE = 256 << 10,
    SUM_BLOCK = 1 << 20, /* as BLOCK in cache/integrity/checksums.py */
    MOST_IDLE_S = 30,    /* older idle connections are not reused: they may be lost */
    CA_CACHED_S = 300,   /* parsed authorities are cached: their file may be replaced */
};
#define HANDLE "fusefs.store.engine.transfer" /* the name of the capsules that Python has */

/* The CRC32 of the bytes [start, stop) of a file; engine.py unpacks it. */
struct sum {
    uint64_t start, stop, crc;
};

enum state { AWAKE, TOLD, ASLEEP }; /* of a worker; TOLD: there is work for another round */
enum phase { CONNECTING, SENDING, AWAITING, RECEIVING };

struct transfer {
    struct transfer *next; /* in the queue, then among the active ones */
    struct worker *worker;
    PyObject *owner, *handle;
    CURL *easy;
    atomic_int is_cancelled;

    /* The request. */
    PyObject *request; /* owns the strings */
    const char *method, *url, *header_lines, *etag, *path, *folder, *proxy, *ca_file;
    struct curl_slist *headers;
    Py_buffer body;
    int is_head, body_fd, is_fresh;
    int64_t body_offset, body_length, body_sent;
    double connect_s, silence_s, least_rate, window_s, total_s;
    /* The sink: a file, a file created at `path` when all of its bytes are there, or memory. */
    int sink_fd;
    int64_t sink_offset, start, length, size, limit, progress;

    /* The answer. */
    enum phase phase;
    double submitted, last_moved, moved_off_disk, window_began; /* monotonic, two off the disk */
    double connected_s, first_byte_s, last_byte_s;              /* since `submitted`, 0: not yet */
    int64_t window_moved;                          /* bytes in either direction */
    int head_size, is_checked, is_enough;
    atomic_int status; /* set with the headers; Python may read it at any time */
    char *content;     /* for a sink in memory, or gathered for a file */
    size_t content_size, content_room;
    int64_t received; /* bytes in the sink's file */
    struct sum *sums; /* with room for the whole sink, or NULL */
    size_t sum_count, head_length;
    char *head; /* "name\0value\0..." */
    /* The outcome; if `error` is NULL, `code` may still be an error. */
    const char *error;
    CURLcode code;
    int is_over, error_number;
    long proxy_status;
    char detail[CURL_ERROR_SIZE];

    /* Guarded by the worker's mutex: what Python is to be told. */
    int64_t shown;
    size_t sums_shown, sums_taken;
    int is_listed, is_complete;
    struct transfer *next_listed;
};

struct worker {
    PyObject_HEAD
    CURLM *multi;
    CURLSH *share;
    long received_at_once;
    int eventfd, load; /* `load`: the number of transfers that Python has not collected */
    atomic_int is_stopping;
    _Atomic enum state state;
    struct transfer *active;
    double on_disk_s; /* time on the local disk */

    pthread_mutex_t mutex;
    struct transfer *queue, **queue_end, *listed;
};

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Lists a transfer's progress or end for Python; the eventfd is to be written then. */
static void report(struct transfer *t) {
    struct worker *worker = t->worker;
    int is_complete = t->easy == NULL;
    size_t sums = t->sum_count;
    if (!is_complete && sums && t->sums[sums - 1].stop % SUM_BLOCK)
        sums--; /* this one may still grow */
    pthread_mutex_lock(&worker->mutex);
    t->shown = t->received;
    t->sums_shown = sums;
    t->is_complete = is_complete;
    if (!t->is_listed) {
        t->is_listed = 1;
        t->next_listed = worker->listed;
        worker->listed = t;
    }
    pthread_mutex_unlock(&worker->mutex);
}

/* ---------------------------------------------------------------- the sink */

static int reserve(struct transfer *t, size_t room) {
    if (room <= t->content_room)
        return 1;
    char *content = realloc(t->content, room);
    if (content == NULL) {
        t->error = "memory";
        return 0;
    }
    t->content = content;
    t->content_room = room;
    return 1;
}

static void add_sums(struct transfer *t, uint64_t at, const char *data, size_t size) {
    while (size) {
        if (!t->sum_count || t->sums[t->sum_count - 1].stop % SUM_BLOCK == 0)
            t->sums[t->sum_count++] = (struct sum){at, at, 0};
        struct sum *sum = &t->sums[t->sum_count - 1];
        size_t count = least(SUM_BLOCK - at % SUM_BLOCK, size);
        sum->crc = crc32_of((uint32_t)sum->crc, data, count);
        sum->stop = at += count;
        data += count;
        size -= count;
    }
}

static int fail_sink(struct transfer *t, int number) {
    if (t->error == NULL)
        t->error = "sink-failed";
    t->error_number = number;
    return 0;
}

/* Creates the sink's file, and its folder if it is missing. */
static int create(struct transfer *t) {
    int flags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    t->sink_fd = open(t->path, flags, 0600);
    if (t->sink_fd < 0 && errno == ENOENT && (mkdir(t->folder, 0777) == 0 || errno == EEXIST))
        t->sink_fd = open(t->path, flags, 0600);
    return t->sink_fd >= 0 || fail_sink(t, errno);
}

/* Writes the gathered bytes. Bytes that a failed write left in the file are not counted. */
static int flush(struct transfer *t) {
    double began = now_s();
    const char *data = t->content;
    size_t left = t->content_size;
    t->content_size = 0;
    if (t->sink_fd < 0 && ((int64_t)left < t->length || !create(t)))
        return t->error == NULL;
    while (left) {
        int64_t at = t->sink_offset + t->received;
        ssize_t count = pwrite(t->sink_fd, data, left, at);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return fail_sink(t, count ? errno : EIO);
        if (t->sums != NULL)
            add_sums(t, (uint64_t)at, data, (size_t)count);
        t->received += count;
        data += count;
        left -= (size_t)count;
    }
    t->worker->on_disk_s += now_s() - began;
    if (t->progress && (!t->shown || t->received - t->shown >= t->progress)) {
        report(t);
        eventfd_write(t->worker->eventfd, 1);
    }
    return 1;
}

static int is_for_file(const struct transfer *t) {
    return (t->sink_fd >= 0 || t->path != NULL) && !t->is_head && t->status / 100 == 2;
}

static const char *header(const struct transfer *t, const char *name) {
    struct curl_header *found; /* of the last answer, neither 1xx nor a proxy's */
    return curl_easy_header(t->easy, name, 0, CURLH_HEADER, -1, &found) ? "" : found->value;
}

/* Compares ETags without quotes, which some servers leave out, and without the mark of a weak
 * ETag, which some proxies add. */
static int has_etag(const struct transfer *t) {
    const char *seen = header(t, "etag");
    size_t size = strlen(t->etag);
    seen += strncmp(seen, "W/", 2) == 0 ? 2 : 0;
    seen += *seen == '"';
    return *seen && !strncmp(seen, t->etag, size) && (!seen[size] || !strcmp(seen + size, "\""));
}

/* Returns the error if the headers show that the answer is not for the sink, or NULL. */
static const char *refusal(const struct transfer *t) {
    curl_off_t length = -1; /* -1: unknown */
    long long first = -1, last = -1, size = -1;
    curl_easy_getinfo(t->easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
    if (!is_for_file(t))
        return NULL; /* `to_memory` has a limit */
    if (t->status != 200 && t->status != 206)
        return "protocol";
    if (t->etag && !has_etag(t))
        return "etag";
    if (t->status == 200) {
        if (t->start != 0)
            return "range";
        size = length;
    } else { /* RFC 9110, section 14.4; the size may be an asterisk. A shorter range is "short". */
        const char *range = header(t, "content-range");
        if (sscanf(range, "bytes %lld-%lld/%lld", &first, &last, &size) < 2 || first != t->start ||
            last < first || last - first >= t->length || length > last - first + 1)
            return "range";
    }
    return t->size >= 0 && size >= 0 && size != t->size ? "size" : NULL;
}

static int to_file(struct transfer *t, const char *data, size_t size) {
    size_t room = least((size_t)t->length, GATHERED);
    size_t left = (size_t)(t->length - t->received) - t->content_size;
    if (size > left) {
        size = left;
        /* A server may send the whole object instead of its first bytes: ignore the rest. */
        if (t->status == 200 && (t->size < 0 || t->size > t->length))
            t->is_enough = 1;
        else
            t->error = t->status == 200 ? "size" : "range";
    }
    if (!reserve(t, room))
        return 0;
    while (size) {
        int is_first = t->progress && !t->path && !t->received;
        size_t full = is_first ? least(FIRST, room) : room;
        size_t count = least(full - t->content_size, size);
        memcpy(t->content + t->content_size, data, count);
        t->content_size += count;
        data += count;
        size -= count;
        if (t->content_size == full && !flush(t))
            return 0;
    }
    return !t->is_enough && t->error == NULL;
}

static int to_memory(struct transfer *t, const char *data, size_t size) {
    size_t needed = t->content_size + size;
    if ((int64_t)needed > (t->status < 300 ? t->limit : MOST_DOCUMENT)) {
        t->error = "too-large";
        t->content_size = 0;
        return 0;
    }
    if (needed > t->content_room && !reserve(t, needed + needed / 2 + 64))
        return 0;
    memcpy(t->content + t->content_size, data, size);
    t->content_size = needed;
    return 1;
}

/* ---------------------------------------------------------------- libcurl's callbacks */

static double time_off_disk_s(struct transfer *t) { return now_s() - t->worker->on_disk_s; }

static void note_moved(struct transfer *t, size_t size) {
    t->last_moved = now_s();
    t->moved_off_disk = time_off_disk_s(t);
    t->window_moved += (int64_t)size;
}

static void begin_phase(struct transfer *t, enum phase phase) {
    t->phase = phase;
    note_moved(t, 0);
    t->window_began = t->moved_off_disk;
    t->window_moved = 0;
}

static size_t on_body(char *data, size_t Py_UNUSED(one), size_t size, void *argument) {
    struct transfer *t = argument;
    note_moved(t, size);
    if (!t->is_checked && (t->error = refusal(t)) != NULL)
        return CURL_WRITEFUNC_ERROR;
    t->is_checked = 1;
    int is_taken = is_for_file(t) ? to_file(t, data, size) : to_memory(t, data, size);
    return is_taken ? size : CURL_WRITEFUNC_ERROR;
}

/* Called for each line: status lines, headers, the empty line, and trailers after the body. */
static size_t on_header(char *line, size_t Py_UNUSED(one), size_t size, void *argument) {
    struct transfer *t = argument;
    long status = 0;
    note_moved(t, size);
    t->head_size += (int)size; /* a line has at most 100 KiB */
    if (t->head_size > MOST_HEAD) {
        t->error = "malformed";
        snprintf(t->detail, sizeof t->detail, "too many headers");
        return CURL_WRITEFUNC_ERROR;
    }
    if (!t->status && (*line == '\r' || *line == '\n')) {
        curl_easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
        if (status >= 200) {
            begin_phase(t, RECEIVING);
            t->first_byte_s = t->last_moved - t->submitted;
            t->status = (int)status;
        }
    }
    return size;
}

static size_t on_read(char *to, size_t Py_UNUSED(one), size_t room, void *argument) {
    struct transfer *t = argument;
    double began = now_s();
    ssize_t count = (ssize_t)least(room, (size_t)(t->body_length - t->body_sent));
    if (t->body_fd < 0) {
        memcpy(to, (char *)t->body.buf + t->body_sent, (size_t)count);
    } else if (count) {
        do
            count = pread(t->body_fd, to, (size_t)count, t->body_offset + t->body_sent);
        while (count < 0 && errno == EINTR);
        if (count <= 0) { /* 0: the file became shorter */
            t->error_number = count ? errno : 0;
            t->error = "source-failed";
            return CURL_READFUNC_ABORT;
        }
    }
    t->worker->on_disk_s += now_s() - began;
    note_moved(t, (size_t)count);
    t->body_sent += count;
    if (t->body_sent == t->body_length)
        t->phase = AWAITING;
    return (size_t)count;
}

/* Called with a connection, before the request is sent. libcurl repeats a request whose reused
 * connection ended without an answer. The server may have executed it, so only requests that change
 * nothing are sent again. */
static int on_connected(void *argument, char *Py_UNUSED(a), char *Py_UNUSED(b), int Py_UNUSED(c),
                        int Py_UNUSED(d)) {
    struct transfer *t = argument;
    if (t->connected_s > 0 && !t->is_head && strcmp(t->method, "GET") != 0) {
        t->error = "reset";
        return CURL_PREREQFUNC_ABORT;
    }
    begin_phase(t, t->body_length ? SENDING : AWAITING);
    t->connected_s = t->last_moved - t->submitted;
    return CURL_PREREQFUNC_OK;
}

/* libcurl 7.88 itself opens sockets without CLOEXEC. */
static curl_socket_t open_socket(void *Py_UNUSED(argument), curlsocktype Py_UNUSED(purpose),
                                 struct curl_sockaddr *a) {
    return socket(a->family, a->socktype | SOCK_CLOEXEC, a->protocol);
}

/* ---------------------------------------------------------------- a transfer in its worker */

/* Makes libcurl's list of the lines "Name: value\0". Returns 0 if there is no memory. */
static int read_headers(struct transfer *t) {
    for (const char *line = t->header_lines; *line; line += strlen(line) + 1) {
        struct curl_slist *longer = curl_slist_append(t->headers, line);
        if (longer == NULL)
            return 0;
        t->headers = longer;
    }
    return 1;
}

static int set_options(struct transfer *t, CURL *easy) {
    int bad = 0;
#define SET(option, value) bad |= curl_easy_setopt(easy, CURLOPT_##option, value) != CURLE_OK
    SET(PRIVATE, t);
    SET(SHARE, t->worker->share); /* all transfers of the worker share TLS sessions */
    SET(ERRORBUFFER, t->detail);
    SET(NOSIGNAL, 1L);
    SET(URL, t->url);
    SET(PATH_AS_IS, 1L);
    SET(PROTOCOLS_STR, "http,https");
    SET(DISALLOW_USERNAME_IN_URL, 1L);
    SET(HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    SET(HTTPHEADER, t->headers);
    SET(TCP_NODELAY, 1L);
    SET(TCP_KEEPALIVE, 1L);
    SET(FRESH_CONNECT, (long)t->is_fresh);
    SET(MAXAGE_CONN, (long)MOST_IDLE_S);
    SET(CONNECTTIMEOUT_MS, (long)(fmin(t->connect_s, 1e6) * 1e3) + 1);
    SET(TIMEOUT_MS, (long)(fmin(t->total_s, 1e6) * 1e3));
    SET(QUICK_EXIT, 1L); /* or a cancelled name lookup would block the worker */
    SET(BUFFERSIZE, t->worker->received_at_once);
    /* Empty: the environment's variables are ignored. */
    SET(PROXY, t->proxy ? t->proxy : "");
    SET(NOPROXY, "");
    SET(SUPPRESS_CONNECT_HEADERS, 1L);
    SET(SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    SET(PROXY_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    /* Peer and name are verified by default. libcurl's default directory would be trusted too, and
     * would prevent connections from sharing the parsed authorities. */
    SET(CAPATH, NULL);
    SET(PROXY_CAPATH, NULL);
    SET(CAINFO, t->ca_file);
    SET(PROXY_CAINFO, t->ca_file);
    SET(CA_CACHE_TIMEOUT, (long)CA_CACHED_S);
    SET(OPENSOCKETFUNCTION, open_socket);
    SET(PREREQFUNCTION, on_connected);
    SET(PREREQDATA, t);
    SET(HEADERFUNCTION, on_header);
    SET(HEADERDATA, t);
    SET(WRITEFUNCTION, on_body);
    SET(WRITEDATA, t);
    if (t->is_head)
        SET(NOBODY, 1L);
    else
        SET(CUSTOMREQUEST, t->method);
    if (t->body.obj != NULL || t->body_fd >= 0) {
        SET(UPLOAD, 1L); /* with POSTFIELDS, libcurl would add a Content-Type */
        SET(READFUNCTION, on_read);
        SET(READDATA, t);
        SET(INFILESIZE_LARGE, (curl_off_t)t->body_length);
        SET(UPLOAD_BUFFERSIZE, (long)SENT_AT_ONCE);
    }
#undef SET
    return !bad;
}

/* Copies the headers of the answer. */
static void copy_head(struct transfer *t) {
    struct curl_header *each = NULL;
    FILE *stream = open_memstream(&t->head, &t->head_length);
    while (stream && (each = curl_easy_nextheader(t->easy, CURLH_HEADER, -1, each)) != NULL)
        fprintf(stream, "%s%c%s%c", each->name, 0, each->value, 0);
    if (stream == NULL || fclose(stream) != 0)
        t->error = "memory";
}

/* Determines a transfer's outcome. */
static void conclude(struct transfer *t) {
    long os_error = 0;
    curl_easy_getinfo(t->easy, CURLINFO_OS_ERRNO, &os_error);
    curl_easy_getinfo(t->easy, CURLINFO_HTTP_CONNECTCODE, &t->proxy_status);
    if (t->error == NULL && t->code == CURLE_OK && t->status && !t->is_checked)
        t->error = refusal(t); /* there was no body */
    if (is_for_file(t))
        flush(t); /* bytes before an error count */
    if (t->is_enough)
        t->code = CURLE_OK;
    if (t->status)
        copy_head(t);
    if (t->error == NULL && t->code != CURLE_OK)
        t->error_number = (int)os_error;
}

static void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

/* Closes the sink, and removes a file that was created and that Python has not taken. */
static void close_sink(struct transfer *t) {
    if (t->sink_fd >= 0 && t->path != NULL)
        unlink(t->path);
    close_fd(&t->sink_fd);
}

/* Ends a transfer that is over, too late or cancelled. */
static void finish(struct transfer *t) {
    if (t->easy != NULL) {
        conclude(t);
        /* Closes the connection of an unfinished transfer; no callback follows. */
        curl_multi_remove_handle(t->worker->multi, t->easy);
        curl_easy_cleanup(t->easy);
        t->easy = NULL;
    }
    if (is_for_file(t)) {
        free(t->content);
        t->content = NULL;
        t->content_size = 0;
    }
    close_fd(&t->body_fd);
    if (t->path == NULL || t->error != NULL || t->code != CURLE_OK)
        close_sink(t);
    t->last_byte_s = now_s() - t->submitted;
    report(t);
}

/* Returns the error of a transfer that is too slow, or NULL; lowers `*next` to its next deadline.
 * libcurl itself checks the deadlines for connecting and for the whole transfer. No server is
 * blamed for the worker's waits for the disk: libcurl's buffers are moved in the time after it. */
static const char *lateness(struct transfer *t, double looked_at, double *next) {
    if (t->phase == CONNECTING)
        return NULL;
    double off_disk = time_off_disk_s(t), passed_s = off_disk - t->window_began;
    double left_s = fmax(t->last_moved + t->silence_s - looked_at,
                         t->moved_off_disk + t->silence_s / 4 - off_disk);
    if (left_s <= 0)
        return "timeout";
    *next = fmin(*next, looked_at + left_s);
    if (t->phase == AWAITING || t->least_rate <= 0)
        return NULL;
    if (passed_s >= t->window_s) {
        if ((double)t->window_moved < t->least_rate * passed_s)
            return "low-speed";
        t->window_began += passed_s;
        t->window_moved = 0;
        passed_s = 0;
    }
    *next = fmin(*next, looked_at + t->window_s - passed_s);
    return NULL;
}

static void begin_queued(struct worker *worker) {
    pthread_mutex_lock(&worker->mutex);
    struct transfer *t = worker->queue, *after;
    worker->queue = NULL;
    worker->queue_end = &worker->queue;
    pthread_mutex_unlock(&worker->mutex);
    for (; t != NULL; t = after) {
        after = t->next;
        t->next = worker->active;
        worker->active = t;
        int is_wanted = !t->is_cancelled && !worker->is_stopping; /* else `sweep` ends it */
        t->easy = is_wanted ? curl_easy_init() : NULL;            /* 2 us */
        if (is_wanted && (t->easy == NULL || !read_headers(t) || !set_options(t, t->easy) ||
                          curl_multi_add_handle(worker->multi, t->easy) != CURLM_OK))
            t->error = "memory";
    }
}

/* Ends transfers that are over, cancelled or too slow, and tells Python of them. Returns the number
 * of seconds until another may be too slow. */
static double sweep(struct worker *worker, double looked_at) {
    double next = looked_at + 60;
    int is_stopping = atomic_load(&worker->is_stopping), has_ended = 0;
    struct transfer **link = &worker->active, *t;
    while ((t = *link) != NULL) {
        if (!t->is_over && t->error == NULL)
            t->error = is_stopping || t->is_cancelled ? "cancelled" : lateness(t, looked_at, &next);
        if (t->is_over || t->error != NULL) {
            *link = t->next;
            finish(t);
            has_ended = 1;
        } else {
            link = &t->next;
        }
    }
    if (has_ended)
        eventfd_write(worker->eventfd, 1);
    return fmax(next - now_s(), 0);
}

/* ---------------------------------------------------------------- Python */

static void free_transfer(PyObject *handle) {
    struct transfer *t = PyCapsule_GetPointer(handle, HANDLE);
    PyBuffer_Release(&t->body);
    curl_slist_free_all(t->headers);
    close_sink(t);
    close_fd(&t->body_fd);
    Py_XDECREF(t->request);
    free(t->content), free(t->sums), free(t->head), free(t);
}

/* Parses a request as flattened by engine.py: with body, sink, route and deadlines. */
static int read_request(struct transfer *t, PyObject *request) {
    int sink_fd, body_fd, with_sums;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(request, "ssy#z*iLLLiLLLzLpzzzzdddddLp", &t->method, &t->url,
                          &t->header_lines, &size, &t->body, &body_fd, &t->body_offset,
                          &t->body_length, &t->limit, &sink_fd, &t->sink_offset, &t->start,
                          &t->length, &t->etag, &t->size, &with_sums, &t->path, &t->folder,
                          &t->proxy, &t->ca_file, &t->connect_s, &t->silence_s, &t->least_rate,
                          &t->window_s, &t->total_s, &t->progress, &t->is_fresh))
        return 0;
    t->request = Py_NewRef(request);
    if (t->sink_offset < 0 || t->start < 0 || t->length < 0 ||
        t->length > INT64_MAX - t->sink_offset || (t->path != NULL && t->length > GATHERED)) {
        PyErr_SetString(PyExc_ValueError, "the range of a sink");
        return 0;
    }
    if (t->body.obj != NULL)
        t->body_length = t->body.len;
    t->is_head = strcmp(t->method, "HEAD") == 0;
    if (with_sums &&
        (t->sums = calloc((size_t)(t->length / SUM_BLOCK) + 2, sizeof *t->sums)) == NULL)
        return PyErr_NoMemory() != NULL;
    if ((body_fd >= 0 && (t->body_fd = fcntl(body_fd, F_DUPFD_CLOEXEC, 0)) < 0) ||
        (sink_fd >= 0 && (t->sink_fd = fcntl(sink_fd, F_DUPFD_CLOEXEC, 0)) < 0))
        return PyErr_SetFromErrno(PyExc_OSError) != NULL;
    return 1;
}

/* Has a worker look for work. A wake-up is a system call, which one that is awake does not need. */
static void tell(struct worker *worker) {
    if (atomic_exchange(&worker->state, TOLD) == ASLEEP)
        curl_multi_wakeup(worker->multi);
}

/* Submits a request; returns the transfer's handle. `collect` names the transfer by its owner. */
static PyObject *worker_submit(struct worker *worker, PyObject *arguments) {
    PyObject *owner, *request;
    if (!PyArg_ParseTuple(arguments, "OO!", &owner, &PyTuple_Type, &request))
        return NULL;
    struct transfer *t = calloc(1, sizeof *t);
    PyObject *handle = t != NULL ? PyCapsule_New(t, HANDLE, free_transfer) : PyErr_NoMemory();
    if (handle == NULL) {
        free(t);
        return NULL;
    }
    t->sink_fd = t->body_fd = -1;
    if (!read_request(t, request)) {
        Py_DECREF(handle);
        return NULL;
    }
    t->owner = Py_NewRef(owner);
    t->handle = Py_NewRef(handle);
    t->submitted = now_s();
    t->worker = worker;
    worker->load++;
    pthread_mutex_lock(&worker->mutex);
    *worker->queue_end = t;
    worker->queue_end = &t->next;
    pthread_mutex_unlock(&worker->mutex);
    tell(worker);
    return handle;
}

static PyObject *worker_cancel(struct worker *worker, PyObject *handle) {
    struct transfer *t = PyCapsule_GetPointer(handle, HANDLE);
    if (t == NULL)
        return NULL;
    atomic_store(&t->is_cancelled, 1);
    tell(worker);
    Py_RETURN_NONE;
}

/* Returns the status of a transfer's answer; 0: there is none yet. */
static PyObject *worker_status(struct worker *Py_UNUSED(worker), PyObject *handle) {
    struct transfer *t = PyCapsule_GetPointer(handle, HANDLE);
    return t != NULL ? PyLong_FromLong(t->status) : NULL;
}

/* Returns the descriptor of the created file, or -1. The transfer must be complete. */
static PyObject *worker_take_file(struct worker *Py_UNUSED(worker), PyObject *handle) {
    struct transfer *t = PyCapsule_GetPointer(handle, HANDLE);
    if (t == NULL)
        return NULL;
    int fd = t->sink_fd;
    t->sink_fd = -1;
    return PyLong_FromLong(fd);
}

static PyObject *outcome_of(const struct transfer *t) {
    return Py_BuildValue(
        "iy#y#LziilNddd", t->status, t->head ? t->head : "", (Py_ssize_t)t->head_length,
        t->content ? t->content : "", (Py_ssize_t)t->content_size, (long long)t->received, t->error,
        (int)t->code, t->error_number, t->proxy_status,
        PyUnicode_DecodeUTF8(t->detail, (Py_ssize_t)strlen(t->detail), "replace"), t->connected_s,
        t->first_byte_s, t->last_byte_s);
}

/* Returns the listed transfers: the owner, the bytes in the sink's file, the new sums, and the
 * outcome, or None if the transfer is not complete. */
static PyObject *worker_collect(struct worker *worker, PyObject *Py_UNUSED(ignored)) {
    eventfd_t ignored;
    PyObject *reports = PyList_New(0);
    /* Before the list is taken: a later report writes the eventfd again. */
    eventfd_read(worker->eventfd, &ignored);
    pthread_mutex_lock(&worker->mutex);
    struct transfer *t = worker->listed, *after;
    worker->listed = NULL;
    pthread_mutex_unlock(&worker->mutex);
    for (; t != NULL; t = after) {
        pthread_mutex_lock(&worker->mutex);
        long long shown = t->shown;
        size_t first = t->sums_taken, stop = t->sums_taken = t->sums_shown;
        int is_complete = t->is_complete;
        after = t->next_listed;
        t->is_listed = 0;
        pthread_mutex_unlock(&worker->mutex);
        /* A reported sum does not change any more. */
        const char *sums = stop > first ? (const char *)(t->sums + first) : "";
        Py_ssize_t size = (Py_ssize_t)((stop - first) * sizeof *t->sums);
        PyObject *report = NULL;
        if (reports != NULL)
            report = Py_BuildValue("OLy#N", t->owner, shown, sums, size,
                                   is_complete ? outcome_of(t) : Py_NewRef(Py_None));
        if (report == NULL || PyList_Append(reports, report) < 0)
            Py_CLEAR(reports);
        Py_XDECREF(report);
        if (is_complete) {
            worker->load--;
            Py_CLEAR(t->owner);
            Py_CLEAR(t->handle);
        }
    }
    return reports;
}

/* Does the worker's work until `stop`; then all transfers are complete, and can be collected. */
static PyObject *worker_run(struct worker *worker, PyObject *Py_UNUSED(ignored)) {
    int is_stopping, ignored;
    Py_BEGIN_ALLOW_THREADS;
    do {
        CURLMsg *message;
        struct transfer *t;
        enum state awake = AWAKE;
        atomic_store(&worker->state, AWAKE);
        is_stopping = atomic_load(&worker->is_stopping);
        begin_queued(worker);
        double looked_at = now_s();
        curl_multi_perform(worker->multi, &ignored);
        while ((message = curl_multi_info_read(worker->multi, &ignored)) != NULL) {
            curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, (char **)&t);
            t->code = message->data.result;
            t->is_over = 1;
        }
        double wait_s = sweep(worker, looked_at);
        /* A wake-up before the call makes it return at once. */
        if (!is_stopping && atomic_compare_exchange_strong(&worker->state, &awake, ASLEEP))
            curl_multi_poll(worker->multi, NULL, 0, (int)ceil(wait_s * 1e3), NULL);
    } while (!is_stopping);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* Cancels all transfers and ends `run`. */
static PyObject *worker_stop(struct worker *worker, PyObject *Py_UNUSED(ignored)) {
    atomic_store(&worker->is_stopping, 1);
    tell(worker);
    Py_RETURN_NONE;
}

static PyObject *worker_new(PyTypeObject *type, PyObject *arguments, PyObject *Py_UNUSED(names)) {
    long max_connections, received_at_once;
    if (!PyArg_ParseTuple(arguments, "ll", &max_connections, &received_at_once))
        return NULL;
    struct worker *worker = (struct worker *)type->tp_alloc(type, 0);
    if (worker == NULL)
        return NULL;
    pthread_mutex_init(&worker->mutex, NULL);
    worker->queue_end = &worker->queue;
    worker->received_at_once = received_at_once;
    worker->eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    worker->multi = curl_multi_init();
    worker->share = curl_share_init();
    if (worker->eventfd < 0 || worker->multi == NULL || worker->share == NULL) {
        PyErr_SetString(PyExc_OSError, "no memory or descriptors for the engine");
        Py_DECREF(worker);
        return NULL;
    }
    /* Only one thread uses the share handle, so it needs no locks. */
    curl_share_setopt(worker->share, CURLSHOPT_SHARE, CURL_LOCK_DATA_SSL_SESSION);
    curl_multi_setopt(worker->multi, CURLMOPT_MAXCONNECTS, max_connections);
    return (PyObject *)worker;
}

static void worker_dealloc(struct worker *worker) {
    PyTypeObject *type = Py_TYPE(worker);
    curl_multi_cleanup(worker->multi); /* closes the connections */
    curl_share_cleanup(worker->share);
    pthread_mutex_destroy(&worker->mutex);
    close_fd(&worker->eventfd);
    type->tp_free(worker);
    Py_DECREF(type);
}

static PyMethodDef worker_methods[] = {
    {"submit", (PyCFunction)worker_submit, METH_VARARGS, NULL},
    {"cancel", (PyCFunction)worker_cancel, METH_O, NULL},
    {"status", (PyCFunction)worker_status, METH_O, NULL},
    {"take_file", (PyCFunction)worker_take_file, METH_O, NULL},
    {"collect", (PyCFunction)worker_collect, METH_NOARGS, NULL},
    {"run", (PyCFunction)worker_run, METH_NOARGS, NULL},
    {"stop", (PyCFunction)worker_stop, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef worker_members[] = {
    {"eventfd", T_INT, offsetof(struct worker, eventfd), READONLY, NULL},
    {"load", T_INT, offsetof(struct worker, load), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot worker_slots[] = {
    {Py_tp_new, worker_new},         {Py_tp_dealloc, worker_dealloc},
    {Py_tp_methods, worker_methods}, {Py_tp_members, worker_members},
    {0, NULL},
};

static PyType_Spec worker_spec = {"fusefs.store.engine._engine.Worker", sizeof(struct worker), 0,
                                  Py_TPFLAGS_DEFAULT, worker_slots};

static int module_exec(PyObject *module) {
    /* Thread-safe since libcurl 7.84; only the first call has an effect. */
    if (curl_global_init(CURL_GLOBAL_ALL) != CURLE_OK) {
        PyErr_SetString(PyExc_ImportError, "libcurl can't be initialised");
        return -1;
    }
    PyObject *worker = PyType_FromModuleAndSpec(module, &worker_spec, NULL);
    int is_bad = worker == NULL || PyModule_AddObjectRef(module, "Worker", worker) < 0;
    Py_XDECREF(worker);
    return is_bad ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_engine", .m_slots = module_slots};

PyMODINIT_FUNC PyInit__engine(void) {
    return PyModuleDef_Init(&module);
}
