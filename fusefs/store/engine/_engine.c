/* HTTP requests by libcurl in worker threads, which never hold the interpreter lock.
 *
 * Python hands a request to a worker (`submit`); the worker runs it in a curl multi handle of
 * its own, with its own connections, writes the answer's body to the request's sink, and puts
 * the transfer on the engine's list of completed ones; an eventfd tells the event loop that
 * there is something to `collect`. engine.py is the other side of all this.
 *
 * Threads. A transfer belongs to Python until it is queued, then to its worker, then to Python
 * again from the moment when it is on the completed list; only `collect` frees it. Two mutexes:
 * each worker's guards its queue and its cancellations, the engine's guards the lists of what is
 * to collect. Both are held for a few instructions, never one within the other, and nothing of
 * Python runs meanwhile. Python objects (`token`, `body`) are touched with the interpreter lock.
 *
 * libcurl (https://curl.se/libcurl/c/threadsafe.html): a multi handle and its easy handles
 * are used by one thread alone; of another thread only curl_multi_wakeup is allowed. */

#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>
#include <structmember.h>

#include <curl/curl.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "crc.h"

#if LIBCURL_VERSION_NUM < 0x075700 /* CURLOPT_QUICK_EXIT */
#error "fusefs needs libcurl 7.87 or newer"
#endif

enum {
    MOST_WORKERS = 32,      /* small and large ones together */
    MOST_HEAD = 64 << 10,   /* headers of an answer, with those of the 1xx before it */
    MOST_INTERIM = 10,      /* answers with status 1xx before the answer */
    MOST_DOCUMENT = 1 << 20, /* the body of an answer that is not 2xx */
    LARGE = 512 << 10,      /* a body of more goes to a worker for large ones */
    /* TLS hands bytes on in records of 16 KiB; larger writes have the page cache use larger
     * folios. Buffers belong to transfers under way and are freed with them. */
    GATHERED = 256 << 10,
    RECEIVE = 256 << 10,
    SEND = 256 << 10,
    SUM_BLOCK = 1 << 20,    /* as BLOCK in cache/integrity/checksums.py */
    IDLE_MS = 60 * 1000,
    MOST_SPARE = 64,        /* easy handles that a worker keeps for the next transfers */
};
#define MOST_IDLE_S 30L  /* a connection is not reused after that: the network may have lost it */
#define CA_CACHED_S 300L /* authorities are parsed; their file may be replaced */
#define STALLED_S 0.1    /* a worker's time on the local disk that no server is to blame for */

struct sum {
    uint64_t start, stop;
    uint32_t crc;
};

struct buffer {
    char *data;
    size_t size, room;
};

enum phase { CONNECTING, SENDING, AWAITING, RECEIVING };

/* A Python object, to which the engine has a reference from `submit` until `collect`. */
struct transfer {
    PyObject_HEAD
    struct transfer *next, *previous;
    struct worker *worker; /* NULL until it is submitted */
    uint64_t number;
    CURL *easy;

    /* The request. */
    char *method, *url, *proxy, *ca_file, *etag;
    struct curl_slist *headers;
    Py_buffer body;
    int is_head, has_body, body_fd, is_fresh;
    int64_t body_offset, body_length, body_sent;
    double connect_s, silence_s, least_rate, window_s, total_s;

    /* The sink: a file, or memory (sink_fd is -1). */
    int sink_fd, with_sums;
    int64_t sink_offset, start, length, size, limit, progress;

    /* The answer. */
    enum phase phase;
    double submitted, connected, first_byte; /* monotonic seconds */
    double last_moved, window_began;
    int64_t window_moved; /* bytes in either direction */
    int attempts, interim, new_status, status, is_checked, is_enough;
    atomic_int has_begun;
    size_t head_seen;
    struct buffer head; /* name\0value\0... */
    int64_t content_length, range_start, range_stop, range_size; /* -1: not told */
    char *answer_etag; /* in head */
    struct buffer content; /* of a sink in memory, or what is gathered for a file */
    int64_t received;      /* in the sink */
    struct sum *sums;      /* with room for all of the sink */
    size_t sum_count;

    /* The outcome. */
    const char *error;
    int errno_, may_have_been_executed;
    long proxy_status;
    double last_byte;
    char detail[CURL_ERROR_SIZE];

    /* Guarded by the engine's mutex: what Python is to be told, and has been. */
    int64_t shown;
    size_t sums_shown, sums_taken;
    int is_listed;
    struct transfer *next_listed;
};

struct worker {
    struct engine *engine;
    pthread_t thread;
    CURLM *multi;
    CURLSH *share;
    CURL *spare[MOST_SPARE];
    int spare_count;
    struct transfer active;     /* a ring */
    struct transfer *completed; /* not handed over yet */
    double next_check;          /* of deadlines */
    double on_disk_s;           /* what the local disk took in this round */
    atomic_int load;            /* transfers that are queued or active */

    pthread_mutex_t mutex;
    struct transfer *queue, **queue_end;
    uint64_t *cancelled;
    size_t cancelled_count, cancelled_room;
    int is_asleep, is_stopping;
};

typedef struct engine {
    PyObject_HEAD
    PyTypeObject *completion_type, *transfer_type;
    int eventfd, small_count, worker_count;
    struct worker *workers;
    uint64_t last_number;
    atomic_llong sockets, buffered;
    pthread_mutex_t mutex;
    struct transfer *completed, *listed;
} Engine;

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* ---------------------------------------------------------------- buffers */

static int reserve(struct transfer *t, struct buffer *buffer, size_t room) {
    if (room <= buffer->room)
        return 1;
    char *data = realloc(buffer->data, room);
    if (data == NULL) {
        t->error = "memory";
        return 0;
    }
    atomic_fetch_add(&t->worker->engine->buffered, (long long)(room - buffer->room));
    buffer->data = data;
    buffer->room = room;
    return 1;
}

static int append(struct transfer *t, struct buffer *buffer, const char *data, size_t size) {
    size_t needed = buffer->size + size;
    if (needed > buffer->room && !reserve(t, buffer, needed + needed / 2 + 64))
        return 0;
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size = needed;
    return 1;
}

static void release(Engine *engine, struct buffer *buffer) {
    atomic_fetch_sub(&engine->buffered, (long long)buffer->room);
    free(buffer->data);
    *buffer = (struct buffer){0};
}

/* ---------------------------------------------------------------- what there is to collect */

/* The eventfd is written only when both lists were empty: what comes until Python collects
 * them takes no further wake-up. */
static void notify(Engine *engine, int was_empty) {
    if (was_empty)
        eventfd_write(engine->eventfd, 1);
}

static void show_progress(struct transfer *t) {
    Engine *engine = t->worker->engine;
    pthread_mutex_lock(&engine->mutex);
    int was_empty = engine->completed == NULL && engine->listed == NULL;
    t->shown = t->received;
    /* The last one may still grow. */
    int is_growing = t->easy && t->sum_count && t->sums[t->sum_count - 1].stop % SUM_BLOCK;
    t->sums_shown = t->sum_count - (size_t)is_growing;
    if (!t->is_listed) {
        t->is_listed = 1;
        t->next_listed = engine->listed;
        engine->listed = t;
    }
    pthread_mutex_unlock(&engine->mutex);
    notify(engine, was_empty);
}

static void hand_over(struct worker *worker) {
    Engine *engine = worker->engine;
    struct transfer *last = worker->completed;
    if (last == NULL)
        return;
    while (last->next != NULL)
        last = last->next;
    pthread_mutex_lock(&engine->mutex);
    int was_empty = engine->completed == NULL && engine->listed == NULL;
    last->next = engine->completed;
    engine->completed = worker->completed;
    pthread_mutex_unlock(&engine->mutex);
    worker->completed = NULL;
    notify(engine, was_empty);
}

/* ---------------------------------------------------------------- the sink */

static void add_sums(struct transfer *t, uint64_t at, const char *data, size_t size) {
    while (size) {
        struct sum *sum = t->sum_count ? &t->sums[t->sum_count - 1] : NULL;
        if (sum == NULL || sum->stop % SUM_BLOCK == 0) {
            sum = &t->sums[t->sum_count++];
            *sum = (struct sum){at, at, 0};
        }
        size_t count = SUM_BLOCK - at % SUM_BLOCK;
        count = count < size ? count : size;
        sum->crc = (uint32_t)crc_of(CRC32, sum->crc, data, count);
        sum->stop = at += count;
        data += count;
        size -= count;
    }
}

/* Writes what is gathered. What a failing write leaves in the file is not counted as received. */
static int flush(struct transfer *t) {
    double began = now_s();
    const char *data = t->content.data;
    size_t left = t->content.size;
    t->content.size = 0;
    while (left) {
        int64_t at = t->sink_offset + t->received;
        ssize_t count = pwrite(t->sink_fd, data, left, at);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) {
            t->errno_ = count ? errno : EIO;
            t->error = t->errno_ == ENOSPC || t->errno_ == EDQUOT ? "sink-full" : "sink-failed";
            return 0;
        }
        if (t->with_sums)
            add_sums(t, (uint64_t)at, data, (size_t)count);
        t->received += count;
        data += count;
        left -= (size_t)count;
    }
    t->worker->on_disk_s += now_s() - began;
    if (t->progress && t->received - t->shown >= t->progress)
        show_progress(t);
    return 1;
}

static int is_success(int status) {
    return status >= 200 && status < 300;
}

/* Quotes are no part of an ETag here: some servers leave them out. */
static int is_same_etag(const char *one, const char *other) {
    size_t one_size = strlen(one), other_size = strlen(other);
    if (one_size >= 2 && one[0] == '"' && one[one_size - 1] == '"')
        one++, one_size -= 2;
    if (other_size >= 2 && other[0] == '"' && other[other_size - 1] == '"')
        other++, other_size -= 2;
    return one_size == other_size && memcmp(one, other, one_size) == 0;
}

/* Why the sink must not have this answer, by its headers; NULL if it may. */
static const char *refusal(const struct transfer *t) {
    int64_t length = t->content_length;
    if (!is_success(t->status) || t->is_head)
        return NULL;
    if (t->sink_fd < 0)
        return length > t->limit ? "too-large" : NULL;
    if (t->status != 200 && t->status != 206)
        return "protocol";
    if (t->etag && (t->answer_etag == NULL || !is_same_etag(t->etag, t->answer_etag)))
        return "etag";
    if (t->status == 200) {
        if (t->start != 0)
            return "range";
        return t->size >= 0 && length >= 0 && length != t->size ? "size" : NULL;
    }
    if (t->range_start != t->start || t->range_stop != t->start + t->length)
        return "range";
    if (length >= 0 && length != t->length)
        return "range";
    return t->size >= 0 && t->range_size >= 0 && t->range_size != t->size ? "size" : NULL;
}

static int check(struct transfer *t) {
    t->is_checked = 1;
    if (t->error == NULL)
        t->error = refusal(t);
    return t->error == NULL;
}

static int to_file(struct transfer *t, const char *data, size_t size) {
    int64_t left = t->length - t->received - (int64_t)t->content.size;
    if ((int64_t)size > left) {
        size = (size_t)left;
        /* The whole object in place of its first bytes: the rest is not wanted. */
        if (t->status == 200 && (t->size < 0 || t->size > t->length))
            t->is_enough = 1;
        else
            t->error = t->status == 200 ? "size" : "range";
    }
    size_t room = t->length < GATHERED ? (size_t)t->length : GATHERED;
    if (!reserve(t, &t->content, room))
        return 0;
    while (size) {
        size_t count = t->content.room - t->content.size;
        count = count < size ? count : size;
        memcpy(t->content.data + t->content.size, data, count);
        t->content.size += count;
        data += count;
        size -= count;
        if (t->content.size == t->content.room && !flush(t))
            return 0;
    }
    return !t->is_enough && t->error == NULL;
}

static void note_moved(struct transfer *t, size_t size) {
    t->last_moved = now_s();
    t->window_moved += (int64_t)size;
}

static size_t on_body(char *data, size_t one, size_t size, void *argument) {
    struct transfer *t = argument;
    (void)one; /* always 1 */
    note_moved(t, size);
    if (!t->is_checked && !check(t))
        return CURL_WRITEFUNC_ERROR;
    int is_wanted = is_success(t->status);
    if (is_wanted && t->sink_fd >= 0)
        return to_file(t, data, size) ? size : CURL_WRITEFUNC_ERROR;
    if ((int64_t)(t->content.size + size) > (is_wanted ? t->limit : MOST_DOCUMENT)) {
        t->error = is_wanted ? "too-large" : NULL;
        t->is_enough = !is_wanted; /* the status says enough */
        t->content.size = 0;
        return CURL_WRITEFUNC_ERROR;
    }
    if (t->content.room == 0 && t->content_length > 0 && t->content_length <= t->limit)
        reserve(t, &t->content, (size_t)t->content_length);
    return append(t, &t->content, data, size) ? size : CURL_WRITEFUNC_ERROR;
}

/* ---------------------------------------------------------------- headers */

static int64_t number_in(const char *text, const char **end) {
    char *stop;
    if (*text < '0' || *text > '9')
        return -1;
    errno = 0;
    long long value = strtoll(text, &stop, 10);
    *end = stop;
    return errno ? -1 : value;
}

/* RFC 9110, section 14.4: bytes FIRST-LAST/SIZE, where SIZE may be an asterisk. */
static void read_range(struct transfer *t, const char *text) {
    const char *at = text + 6;
    if (strncasecmp(text, "bytes ", 6) != 0)
        return;
    int64_t first = number_in(at, &at);
    if (first < 0 || *at++ != '-')
        return;
    int64_t last = number_in(at, &at);
    if (last < first || last == INT64_MAX || *at++ != '/')
        return;
    t->range_start = first;
    t->range_stop = last + 1;
    t->range_size = number_in(at, &at);
}

/* Forgets the headers of an answer with status 1xx. */
static void reset_head(struct transfer *t) {
    t->head.size = 0;
    t->content_length = t->range_start = t->range_stop = t->range_size = -1;
    t->answer_etag = NULL;
}

/* Reads the headers once all have come; until then `head` may move. */
static void read_head(struct transfer *t) {
    char *at = t->head.data, *end = t->head.data + t->head.size;
    const char *ignored;
    while (at < end) {
        char *value = at + strlen(at) + 1;
        if (strcmp(at, "content-length") == 0)
            t->content_length = number_in(value, &ignored);
        else if (strcmp(at, "content-range") == 0)
            read_range(t, value);
        else if (strcmp(at, "etag") == 0)
            t->answer_etag = value;
        at = value + strlen(value) + 1;
    }
}

static int add_header(struct transfer *t, const char *line, size_t size) {
    const char *colon = memchr(line, ':', size);
    if (colon == NULL || memchr(line, 0, size) != NULL)
        return 1; /* nothing that is understood; curl has looked at it */
    size_t at = t->head.size, name_size = (size_t)(colon - line);
    const char *value = colon + 1, *end = line + size;
    while (value < end && (*value == ' ' || *value == '\t'))
        value++;
    while (end > value && strchr(" \t\r\n", end[-1]))
        end--;
    if (!append(t, &t->head, line, name_size) || !append(t, &t->head, "", 1) ||
        !append(t, &t->head, value, (size_t)(end - value)) || !append(t, &t->head, "", 1))
        return 0;
    for (char *c = t->head.data + at; *c; c++)
        if (*c >= 'A' && *c <= 'Z')
            *c += 'a' - 'A';
    return 1;
}

/* Called with each line: status lines, headers, the empty line, and trailers after the body. */
static size_t on_header(char *line, size_t one, size_t size, void *argument) {
    struct transfer *t = argument;
    (void)one;
    note_moved(t, size);
    if ((t->head_seen += size) > MOST_HEAD) {
        t->error = "protocol";
        snprintf(t->detail, sizeof t->detail, "more than %d bytes of headers", MOST_HEAD);
        return CURL_WRITEFUNC_ERROR;
    }
    if (t->status)
        return size; /* a trailer */
    if (size > 9 && strncmp(line, "HTTP/", 5) == 0) {
        reset_head(t);
        t->new_status = atoi(memchr(line, ' ', size) ? (char *)memchr(line, ' ', size) + 1 : "0");
        if (t->new_status >= 200) {
            t->phase = RECEIVING;
            t->first_byte = t->window_began = t->last_moved;
            t->window_moved = 0;
        } else if (++t->interim > MOST_INTERIM) {
            t->error = "protocol";
            snprintf(t->detail, sizeof t->detail, "more than %d answers with 1xx", MOST_INTERIM);
            return CURL_WRITEFUNC_ERROR;
        }
        return size;
    }
    if (*line != '\r' && *line != '\n')
        return add_header(t, line, size) ? size : CURL_WRITEFUNC_ERROR;
    if (t->new_status >= 200) {
        t->status = t->new_status;
        read_head(t);
        atomic_store(&t->has_begun, 1);
    }
    return size;
}

/* ---------------------------------------------------------------- the request's body */

static size_t on_read(char *to, size_t one, size_t room, void *argument) {
    struct transfer *t = argument;
    (void)one;
    int64_t left = t->body_length - t->body_sent;
    if ((int64_t)room > left)
        room = (size_t)left;
    if (t->body_fd < 0) {
        memcpy(to, (char *)t->body.buf + t->body_sent, room);
    } else if (room) {
        ssize_t count;
        double began = now_s();
        do
            count = pread(t->body_fd, to, room, t->body_offset + t->body_sent);
        while (count < 0 && errno == EINTR);
        t->worker->on_disk_s += now_s() - began;
        if (count <= 0) { /* 0: the file became shorter */
            t->errno_ = count ? errno : 0;
            t->error = "source-failed";
            return CURL_READFUNC_ABORT;
        }
        room = (size_t)count;
    }
    t->body_sent += (int64_t)room;
    note_moved(t, room);
    if (t->body_sent == t->body_length)
        t->phase = AWAITING;
    return room;
}

/* Called when a connection is there, before the request is sent over it. libcurl repeats a request
 * whose reused connection ended without an answer. The server may have executed it, so only one
 * that changes nothing is sent again. */
static int on_connected(void *argument, char *a, char *b, int c, int d) {
    struct transfer *t = argument;
    (void)a, (void)b, (void)c, (void)d;
    int changes = !t->is_head && strcmp(t->method, "GET") != 0;
    if (t->attempts++ && changes) {
        t->error = "reset";
        return CURL_PREREQFUNC_ABORT;
    }
    t->connected = t->last_moved = t->window_began = now_s();
    t->window_moved = 0;
    t->phase = t->body_length ? SENDING : AWAITING;
    t->worker->next_check = fmin(t->worker->next_check, t->connected); /* there are deadlines now */
    return CURL_PREREQFUNC_OK;
}

/* ---------------------------------------------------------------- sockets */

/* libcurl 7.88 opens them without CLOEXEC. */
static curl_socket_t open_socket(void *argument, curlsocktype purpose, struct curl_sockaddr *a) {
    Engine *engine = argument;
    (void)purpose;
    int fd = socket(a->family, a->socktype | SOCK_CLOEXEC, a->protocol);
    if (fd >= 0)
        atomic_fetch_add(&engine->sockets, 1);
    return fd;
}

static int close_socket(void *argument, curl_socket_t fd) {
    Engine *engine = argument;
    atomic_fetch_sub(&engine->sockets, 1);
    return close(fd);
}

/* ---------------------------------------------------------------- a transfer in its worker */

static int set_options(struct transfer *t, CURL *easy) {
    int bad = 0;
#define SET(option, value) bad |= curl_easy_setopt(easy, CURLOPT_##option, value) != CURLE_OK
    Engine *engine = t->worker->engine;
    SET(PRIVATE, t);
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
    SET(CONNECTTIMEOUT_MS, (long)(t->connect_s * 1000) + 1);
    SET(QUICK_EXIT, 1L); /* or a cancelled name lookup has the worker wait for its thread */
    SET(FRESH_CONNECT, (long)t->is_fresh);
    SET(MAXAGE_CONN, MOST_IDLE_S);
    SET(CA_CACHE_TIMEOUT, CA_CACHED_S);
    SET(BUFFERSIZE, (long)RECEIVE);
    /* Empty: the environment's variables are not looked at. */
    SET(PROXY, t->proxy ? t->proxy : "");
    SET(NOPROXY, "");
    SET(SUPPRESS_CONNECT_HEADERS, 1L);
    SET(SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    SET(PROXY_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
    /* Verification of peer and name is on by default. The directory of libcurl's own default would
     * be trusted as well, and keeps it from sharing the parsed authorities among connections. */
    SET(CAPATH, NULL);
    SET(PROXY_CAPATH, NULL);
    SET(CAINFO, t->ca_file);
    SET(PROXY_CAINFO, t->ca_file);
    SET(OPENSOCKETFUNCTION, open_socket);
    SET(OPENSOCKETDATA, engine);
    SET(CLOSESOCKETFUNCTION, close_socket);
    SET(CLOSESOCKETDATA, engine);
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
    if (t->has_body) { /* as POSTFIELDS, libcurl would add a Content-Type */
        SET(UPLOAD, 1L);
        SET(READFUNCTION, on_read);
        SET(READDATA, t);
        SET(INFILESIZE_LARGE, (curl_off_t)t->body_length);
        SET(UPLOAD_BUFFERSIZE, (long)SEND);
    }
#undef SET
    return !bad;
}

static CURL *take_easy(struct worker *worker) {
    if (worker->spare_count)
        return worker->spare[--worker->spare_count];
    CURL *easy = curl_easy_init();
    /* curl_easy_reset leaves it: sessions of TLS are resumed by all transfers of the worker. */
    if (easy != NULL)
        curl_easy_setopt(easy, CURLOPT_SHARE, worker->share);
    return easy;
}

static void finish(struct worker *worker, struct transfer *t, CURLcode code);

static void begin(struct worker *worker, struct transfer *t) {
    struct transfer *ring = &worker->active;
    t->next = ring;
    t->previous = ring->previous;
    ring->previous->next = t;
    ring->previous = t;
    t->easy = take_easy(worker);
    if (t->easy == NULL || !set_options(t, t->easy) ||
        curl_multi_add_handle(worker->multi, t->easy) != CURLM_OK) {
        t->error = "memory";
        finish(worker, t, CURLE_OUT_OF_MEMORY);
    }
}

static const char *name_of(const struct transfer *t, CURLcode code) {
    if (t->proxy && !t->attempts && (t->proxy_status >= 300 || code == CURLE_COULDNT_CONNECT))
        return "proxy";
    switch (code) {
    case CURLE_COULDNT_RESOLVE_HOST:
        return "resolve";
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_PROXY:
        return "proxy";
    case CURLE_COULDNT_CONNECT:
        return "connect";
    case CURLE_OPERATION_TIMEDOUT:
        return "timeout";
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_ISSUER_ERROR:
    case CURLE_SSL_INVALIDCERTSTATUS:
        return "certificate";
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_SSL_CIPHER:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ENGINE_INITFAILED:
    case CURLE_USE_SSL_FAILED:
        return "tls";
    case CURLE_PARTIAL_FILE:
        return "short";
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_GOT_NOTHING:
    case CURLE_SEND_FAIL_REWIND: /* of a repetition, see on_connected */
        return "reset";
    default: /* also CURLE_OUT_OF_MEMORY: so libcurl calls a header of more than 100 KiB */
        return "protocol";
    }
}

static void conclude(struct transfer *t, CURLcode code) {
    int to_a_file = t->sink_fd >= 0 && is_success(t->status) && !t->is_head;
    long request_size = 0, os_errno = 0;
    curl_easy_getinfo(t->easy, CURLINFO_REQUEST_SIZE, &request_size);
    curl_easy_getinfo(t->easy, CURLINFO_OS_ERRNO, &os_errno);
    curl_easy_getinfo(t->easy, CURLINFO_HTTP_CONNECTCODE, &t->proxy_status);
    if (code == CURLE_OK && !t->is_checked)
        check(t); /* without a body */
    if (to_a_file && (t->error == NULL || strncmp(t->error, "sink", 4) != 0)) {
        const char *before = t->error;
        if (flush(t) || before) /* what arrived before an error counts */
            t->error = before;
    }
    if (t->error == NULL && code != CURLE_OK && !t->is_enough) {
        t->error = name_of(t, code);
        t->errno_ = (int)os_errno;
    }
    /* libcurl takes headers that end with the connection for whole ones. */
    if (!t->status && (t->error == NULL || strcmp(t->error, "short") == 0))
        t->error = "reset";
    if (t->error == NULL && to_a_file && t->received < t->length)
        t->error = "short";
    /* A refusal stands, even if its document broke off or an upload did because of it. */
    if (t->status >= 300 && t->error && strcmp(t->error, "cancelled") != 0)
        t->error = NULL;
    if (!to_a_file)
        t->received = (int64_t)t->content.size;
    t->may_have_been_executed = request_size > 0 && (t->error != NULL || !t->status);
    if (t->error && !t->detail[0] && code != CURLE_OK)
        snprintf(t->detail, sizeof t->detail, "%s", curl_easy_strerror(code));
}

/* The end of a transfer, by itself (curl_multi_info_read), by a deadline or by a cancellation. */
static void finish(struct worker *worker, struct transfer *t, CURLcode code) {
    if (t->easy != NULL) {
        conclude(t, code);
        /* Ends the transfer if it is under way: its connection is closed, no callback follows. */
        curl_multi_remove_handle(worker->multi, t->easy);
        if (worker->spare_count < MOST_SPARE) {
            curl_easy_reset(t->easy);
            worker->spare[worker->spare_count++] = t->easy;
        } else {
            curl_easy_cleanup(t->easy);
        }
        t->easy = NULL;
    }
    if (t->sink_fd >= 0 && is_success(t->status)) {
        release(worker->engine, &t->content);
        if (t->received > t->shown || t->sum_count > t->sums_shown)
            show_progress(t); /* before the completion is handed over */
    }
    if (t->sink_fd >= 0)
        close(t->sink_fd);
    if (t->body_fd >= 0)
        close(t->body_fd);
    t->sink_fd = t->body_fd = -1;
    t->last_byte = now_s();
    t->previous->next = t->next;
    t->next->previous = t->previous;
    t->next = worker->completed;
    worker->completed = t;
    atomic_fetch_sub(&worker->load, 1);
}

static void cancel_all(struct worker *worker, const uint64_t *numbers, size_t count) {
    for (size_t i = 0; i < count; i++)
        for (struct transfer *t = worker->active.next; t != &worker->active; t = t->next)
            if (t->number == numbers[i]) {
                t->error = "cancelled";
                finish(worker, t, CURLE_ABORTED_BY_CALLBACK);
                break;
            }
}

/* The error of a transfer that is too slow, NULL if it is not; `*next` comes no later than its
 * next deadline. The deadline of connecting is libcurl's. */
static const char *lateness(struct transfer *t, double now, double *next) {
    if (t->total_s > 0) {
        if (now >= t->submitted + t->total_s)
            return "timeout";
        *next = fmin(*next, t->submitted + t->total_s);
    }
    if (t->phase == CONNECTING)
        return NULL;
    if (now >= t->last_moved + t->silence_s)
        return "timeout";
    *next = fmin(*next, t->last_moved + t->silence_s);
    if (t->phase == AWAITING || t->least_rate <= 0)
        return NULL;
    if (now >= t->window_began + t->window_s) {
        if ((double)t->window_moved < t->least_rate * (now - t->window_began))
            return "low-speed";
        t->window_began = now;
        t->window_moved = 0;
    }
    *next = fmin(*next, t->window_began + t->window_s);
    return NULL;
}

/* Takes time off that the worker spent on the disk, while the servers' bytes had to wait. */
static void forgive(struct worker *worker, double now) {
    for (struct transfer *t = worker->active.next; t != &worker->active; t = t->next) {
        t->last_moved = fmin(t->last_moved + worker->on_disk_s, now);
        t->window_began = fmin(t->window_began + worker->on_disk_s, now);
    }
}

static void check_deadlines(struct worker *worker, double now) {
    double next = now + IDLE_MS / 1e3;
    struct transfer *t = worker->active.next, *after;
    for (; t != &worker->active; t = after) {
        after = t->next;
        const char *error = lateness(t, now, &next);
        if (error != NULL) {
            t->error = error;
            finish(worker, t, CURLE_OPERATION_TIMEDOUT);
        }
    }
    worker->next_check = next;
}

/* Takes what Python has handed over; 0 if the worker is to end. */
static int take_work(struct worker *worker) {
    pthread_mutex_lock(&worker->mutex);
    struct transfer *t = worker->queue, *after;
    uint64_t *cancelled = worker->cancelled;
    size_t count = worker->cancelled_count;
    int is_stopping = worker->is_stopping;
    worker->queue = NULL;
    worker->queue_end = &worker->queue;
    worker->cancelled = NULL;
    worker->cancelled_count = worker->cancelled_room = 0;
    pthread_mutex_unlock(&worker->mutex);
    for (; t != NULL; t = after) {
        after = t->next;
        begin(worker, t);
    }
    cancel_all(worker, cancelled, count);
    free(cancelled);
    return !is_stopping;
}

static void await_work(struct worker *worker) {
    double wait_s = fmax(worker->next_check - now_s(), 0.0);
    pthread_mutex_lock(&worker->mutex);
    int is_idle = worker->queue == NULL && !worker->cancelled_count && !worker->is_stopping;
    worker->is_asleep = is_idle;
    pthread_mutex_unlock(&worker->mutex);
    if (!is_idle)
        return;
    /* A wake-up that comes between here and the call has it return at once. */
    curl_multi_poll(worker->multi, NULL, 0, (int)(fmin(wait_s * 1e3, IDLE_MS) + 0.999), NULL);
    pthread_mutex_lock(&worker->mutex);
    worker->is_asleep = 0;
    pthread_mutex_unlock(&worker->mutex);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    while (take_work(worker)) {
        int ignored;
        CURLMsg *message;
        worker->on_disk_s = 0;
        curl_multi_perform(worker->multi, &ignored);
        while ((message = curl_multi_info_read(worker->multi, &ignored)) != NULL) {
            char *t;
            CURLcode code = message->data.result; /* `message` does not outlive the handle */
            curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &t);
            finish(worker, (struct transfer *)t, code);
        }
        double now = now_s();
        if (worker->on_disk_s > STALLED_S)
            forgive(worker, now);
        if (now >= worker->next_check)
            check_deadlines(worker, now);
        hand_over(worker);
        await_work(worker);
    }
    while (worker->active.next != &worker->active) {
        worker->active.next->error = "cancelled";
        finish(worker, worker->active.next, CURLE_ABORTED_BY_CALLBACK);
    }
    hand_over(worker);
    while (worker->spare_count)
        curl_easy_cleanup(worker->spare[--worker->spare_count]);
    curl_multi_cleanup(worker->multi); /* closes the connections */
    curl_share_cleanup(worker->share);
    return NULL;
}

/* ---------------------------------------------------------------- Python's side */

static void wake_up(struct worker *worker, int was_asleep) {
    if (was_asleep)
        curl_multi_wakeup(worker->multi);
}

/* With the worker's mutex: the next one need not wake it up again. */
static int noted_asleep(struct worker *worker) {
    int was_asleep = worker->is_asleep;
    worker->is_asleep = 0;
    return was_asleep;
}

static char *copied(const char *text) {
    return text == NULL ? NULL : strdup(text);
}

/* "Name: value" for each pair, and the names of what libcurl shall not add by itself. */
static int read_headers(struct transfer *t, PyObject *headers) {
    PyObject *iterator = PyObject_GetIter(headers), *pair;
    int has_expect = 0, is_bad = iterator == NULL;
    while (!is_bad && (pair = PyIter_Next(iterator)) != NULL) {
        PyObject *name, *value, *line = NULL;
        if (PyArg_ParseTuple(pair, "UU", &name, &value)) {
            /* "Name;" is libcurl's way to send a header without a value. */
            const char *format = PyUnicode_GET_LENGTH(value) ? "%U: %U" : "%U;";
            PyObject *text = PyUnicode_FromFormat(format, name, value);
            line = text == NULL ? NULL : PyUnicode_AsLatin1String(text);
            Py_XDECREF(text);
        }
        Py_DECREF(pair);
        const char *text = line == NULL ? NULL : PyBytes_AS_STRING(line);
        if (text && ((Py_ssize_t)strcspn(text, "\r\n") != PyBytes_GET_SIZE(line) || !*text)) {
            PyErr_SetString(PyExc_ValueError, "a header has a line break or a zero");
            text = NULL;
        }
        struct curl_slist *longer = text ? curl_slist_append(t->headers, text) : NULL;
        if (longer != NULL)
            t->headers = longer;
        has_expect |= text && strncasecmp(text, "expect:", 7) == 0;
        is_bad = longer == NULL;
        Py_XDECREF(line);
    }
    Py_XDECREF(iterator);
    if (PyErr_Occurred())
        return 0;
    static const char *const NOT_ADDED[] = {"Accept:", "Proxy-Connection:", "Expect:"};
    for (int i = 0; !is_bad && i < (has_expect ? 2 : 3); i++) {
        struct curl_slist *longer = curl_slist_append(t->headers, NOT_ADDED[i]);
        is_bad = longer == NULL;
        if (longer != NULL)
            t->headers = longer;
    }
    if (is_bad)
        PyErr_NoMemory();
    return !is_bad;
}

static int duplicated(int fd) {
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        PyErr_SetFromErrno(PyExc_OSError);
    return copy;
}

static int read_body(struct transfer *t, PyObject *body) {
    int fd;
    long long offset, length;
    t->has_body = body != Py_None;
    if (!t->has_body)
        return 1;
    if (!PyTuple_Check(body)) {
        if (PyObject_GetBuffer(body, &t->body, PyBUF_SIMPLE) < 0)
            return 0;
        t->body_length = t->body.len;
        return 1;
    }
    if (!PyArg_ParseTuple(body, "iLL", &fd, &offset, &length))
        return 0;
    t->body_offset = offset;
    t->body_length = length;
    return (t->body_fd = duplicated(fd)) >= 0;
}

static int read_sink(struct transfer *t, PyObject *sink) {
    int fd;
    long long offset, start, length, limit;
    const char *etag;
    PyObject *size;
    t->size = -1;
    if (PyTuple_Check(sink) && PyTuple_GET_SIZE(sink) == 1) {
        if (!PyArg_ParseTuple(sink, "L", &limit))
            return 0;
        t->limit = limit;
        return 1;
    }
    if (!PyArg_ParseTuple(sink, "iLLLzOp", &fd, &offset, &start, &length, &etag, &size,
                          &t->with_sums))
        return 0;
    if (size != Py_None && (t->size = PyLong_AsLongLong(size)) < 0 && PyErr_Occurred())
        return 0;
    if (offset < 0 || start < 0 || length < 0 || length > INT64_MAX - offset ||
        length > INT64_MAX - start) {
        PyErr_SetString(PyExc_ValueError, "the range of a sink");
        return 0;
    }
    t->sink_offset = offset;
    t->start = start;
    t->length = length;
    t->etag = copied(etag);
    if (t->with_sums) {
        t->sums = calloc((size_t)(length / SUM_BLOCK) + 2, sizeof *t->sums);
        if (t->sums == NULL)
            return PyErr_NoMemory() != NULL;
    }
    return (t->sink_fd = duplicated(fd)) >= 0;
}

static int is_plain(const char *text) {
    for (; *text; text++)
        if (*text <= ' ' || *text > '~')
            return 0;
    return 1;
}

static int read_request(struct transfer *t, PyObject *request) {
    const char *method, *url, *proxy, *ca_file;
    PyObject *headers, *body, *sink;
    long long progress;
    if (!PyArg_ParseTuple(request, "ssOOO(zz)(ddddd)Lp", &method, &url, &headers, &body, &sink,
                          &proxy, &ca_file, &t->connect_s, &t->silence_s, &t->least_rate,
                          &t->window_s, &t->total_s, &progress, &t->is_fresh))
        return 0;
    if (!is_plain(method) || !is_plain(url)) {
        PyErr_SetString(PyExc_ValueError, "a URL is percent-encoded ASCII");
        return 0;
    }
    t->progress = progress;
    t->is_head = strcmp(method, "HEAD") == 0;
    t->method = copied(method);
    t->url = copied(url);
    t->proxy = copied(proxy);
    t->ca_file = copied(ca_file);
    return read_headers(t, headers) && read_body(t, body) && read_sink(t, sink);
}

/* The one with the least to do, of those for small or for large bodies; the first of equals, so
 * that a few requests reuse a few connections. */
static struct worker *choose(Engine *engine, const struct transfer *t) {
    int64_t size = t->sink_fd >= 0 ? t->length : 0;
    int is_large = size > LARGE || t->body_length > LARGE;
    int first = is_large ? engine->small_count : 0;
    int stop = is_large ? engine->worker_count : engine->small_count;
    struct worker *chosen = &engine->workers[first];
    for (int i = first + 1; i < stop; i++)
        if (atomic_load(&engine->workers[i].load) < atomic_load(&chosen->load))
            chosen = &engine->workers[i];
    return chosen;
}

static PyObject *engine_submit(Engine *engine, PyObject *arguments) {
    struct transfer *t;
    PyObject *request;
    if (!PyArg_ParseTuple(arguments, "O!O!", engine->transfer_type, &t, &PyTuple_Type, &request))
        return NULL;
    if (engine->workers == NULL || t->worker != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed, or the transfer is used");
        return NULL;
    }
    if (!read_request(t, request))
        return NULL;
    Py_INCREF(t);
    t->submitted = now_s();
    struct worker *worker = t->worker = choose(engine, t);
    int index = (int)(worker - engine->workers);
    t->number = ++engine->last_number * MOST_WORKERS + (uint64_t)index;
    atomic_fetch_add(&worker->load, 1);
    pthread_mutex_lock(&worker->mutex);
    *worker->queue_end = t;
    worker->queue_end = &t->next;
    int was_asleep = noted_asleep(worker);
    pthread_mutex_unlock(&worker->mutex);
    wake_up(worker, was_asleep);
    Py_RETURN_NONE;
}

static PyObject *engine_cancel(Engine *engine, PyObject *argument) {
    struct transfer *t = (struct transfer *)argument;
    if (!PyObject_TypeCheck(argument, engine->transfer_type) || engine->workers == NULL ||
        t->worker == NULL)
        Py_RETURN_NONE;
    struct worker *worker = t->worker;
    int is_noted = 1, was_asleep = 0;
    pthread_mutex_lock(&worker->mutex);
    if (worker->cancelled_count == worker->cancelled_room) {
        size_t room = worker->cancelled_room * 2 + 16;
        uint64_t *longer = realloc(worker->cancelled, room * sizeof *longer);
        is_noted = longer != NULL;
        if (is_noted) {
            worker->cancelled = longer;
            worker->cancelled_room = room;
        }
    }
    if (is_noted) {
        worker->cancelled[worker->cancelled_count++] = t->number;
        was_asleep = noted_asleep(worker);
    }
    pthread_mutex_unlock(&worker->mutex);
    wake_up(worker, was_asleep);
    return is_noted ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

static PyObject *headers_of(const struct transfer *t) {
    PyObject *headers = PyDict_New();
    const char *at = t->head.data, *end = t->head.data + (t->status ? t->head.size : 0);
    while (headers != NULL && at < end) {
        size_t name_size = strlen(at), value_size = strlen(at + name_size + 1);
        PyObject *name = PyUnicode_DecodeLatin1(at, (Py_ssize_t)name_size, NULL);
        const char *text = at + name_size + 1;
        PyObject *value = PyUnicode_DecodeLatin1(text, (Py_ssize_t)value_size, NULL);
        PyObject *before = name == NULL ? NULL : PyDict_GetItemWithError(headers, name);
        if (before != NULL && value != NULL) { /* RFC 9110, section 5.3 */
            PyObject *joined = PyUnicode_FromFormat("%U, %U", before, value);
            Py_SETREF(value, joined);
        }
        if (name == NULL || value == NULL || PyDict_SetItem(headers, name, value) < 0)
            Py_CLEAR(headers);
        Py_XDECREF(name);
        Py_XDECREF(value);
        at = text + value_size + 1;
    }
    return headers;
}

static PyObject *sums_of(const struct sum *sums, size_t count) {
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        PyObject *sum = Py_BuildValue("KKI", (unsigned long long)sums[i].start,
                                      (unsigned long long)sums[i].stop, sums[i].crc);
        if (sum == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, sum);
    }
    return list;
}

static double since_submission(const struct transfer *t, double when) {
    return when > 0 ? when - t->submitted : 0;
}

static PyObject *completion_of(const Engine *engine, const struct transfer *t) {
    PyObject *completion = PyStructSequence_New(engine->completion_type);
    if (completion == NULL)
        return NULL;
    PyObject *fields[] = {
        PyLong_FromLong(t->status),
        headers_of(t),
        PyBytes_FromStringAndSize(t->content.data, (Py_ssize_t)t->content.size),
        PyLong_FromLongLong(t->received),
        t->error ? PyUnicode_FromString(t->error) : Py_NewRef(Py_None),
        PyLong_FromLong(t->errno_),
        PyLong_FromLong(t->proxy_status),
        PyUnicode_DecodeUTF8(t->detail, (Py_ssize_t)strlen(t->detail), "replace"),
        PyBool_FromLong(t->may_have_been_executed),
        PyFloat_FromDouble(since_submission(t, t->connected)),
        PyFloat_FromDouble(since_submission(t, t->first_byte)),
        PyFloat_FromDouble(since_submission(t, t->last_byte)),
    };
    int is_bad = 0;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        is_bad |= fields[i] == NULL;
        PyStructSequence_SET_ITEM(completion, (Py_ssize_t)i, fields[i]);
    }
    if (is_bad)
        Py_CLEAR(completion);
    return completion;
}

/* Appends `item` and takes the reference to it, which may be NULL. */
static int add(PyObject *list, PyObject *item) {
    int is_added = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return is_added;
}

static PyObject *engine_collect(Engine *engine, PyObject *unused) {
    (void)unused;
    eventfd_t ignored;
    /* Before the lists are taken: what comes after that writes it again. */
    eventfd_read(engine->eventfd, &ignored);
    PyObject *completed = PyList_New(0), *progressed = PyList_New(0);
    if (completed == NULL || progressed == NULL) {
        Py_XDECREF(completed);
        Py_XDECREF(progressed);
        return NULL;
    }
    int is_bad = 0;
    pthread_mutex_lock(&engine->mutex);
    struct transfer *done = engine->completed, *listed = engine->listed, *after;
    engine->completed = engine->listed = NULL;
    pthread_mutex_unlock(&engine->mutex);
    /* Those that complete meanwhile are released by the next call. */
    for (; listed != NULL && !is_bad; listed = after) {
        pthread_mutex_lock(&engine->mutex);
        long long shown = listed->shown;
        size_t first = listed->sums_taken, stop = listed->sums_taken = listed->sums_shown;
        after = listed->next_listed;
        listed->is_listed = 0;
        pthread_mutex_unlock(&engine->mutex);
        /* A sum that was shown does not change any more. */
        PyObject *sums = sums_of(listed->sums + first, stop - first);
        is_bad = sums == NULL || !add(progressed, Py_BuildValue("OLN", listed, shown, sums));
    }
    for (; done != NULL; done = after) {
        after = done->next;
        if (!is_bad)
            is_bad = !add(completed, Py_BuildValue("ON", done, completion_of(engine, done)));
        release(engine, &done->head);
        release(engine, &done->content);
        Py_DECREF(done);
    }
    return is_bad ? NULL : Py_BuildValue("NN", completed, progressed);
}

static PyObject *engine_counters(Engine *engine, PyObject *unused) {
    (void)unused;
    int transfers = 0;
    for (int i = 0; engine->workers && i < engine->worker_count; i++)
        transfers += atomic_load(&engine->workers[i].load);
    return Py_BuildValue("{sLsisL}", "connections", (long long)atomic_load(&engine->sockets),
                         "transfers", transfers, "buffered",
                         (long long)atomic_load(&engine->buffered));
}

static PyObject *engine_fileno(Engine *engine, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(engine->eventfd);
}

static PyObject *engine_is_open(Engine *engine, PyObject *unused) {
    (void)unused;
    return PyBool_FromLong(engine->workers != NULL);
}

/* Cancels all and waits for the threads; the completions are there to be collected. */
static PyObject *engine_close(Engine *engine, PyObject *unused) {
    (void)unused;
    struct worker *workers = engine->workers;
    engine->workers = NULL;
    for (int i = 0; workers != NULL && i < engine->worker_count; i++) {
        pthread_mutex_lock(&workers[i].mutex);
        workers[i].is_stopping = 1;
        int was_asleep = noted_asleep(&workers[i]);
        pthread_mutex_unlock(&workers[i].mutex);
        wake_up(&workers[i], was_asleep);
    }
    Py_BEGIN_ALLOW_THREADS;
    for (int i = 0; workers != NULL && i < engine->worker_count; i++) {
        pthread_join(workers[i].thread, NULL);
        pthread_mutex_destroy(&workers[i].mutex);
    }
    Py_END_ALLOW_THREADS;
    free(workers);
    Py_RETURN_NONE;
}

static int start_worker(Engine *engine, struct worker *worker, long max_connections) {
    worker->engine = engine;
    worker->active.next = worker->active.previous = &worker->active;
    worker->queue_end = &worker->queue;
    worker->multi = curl_multi_init();
    worker->share = curl_share_init();
    pthread_mutex_init(&worker->mutex, NULL);
    if (worker->multi == NULL || worker->share == NULL)
        return 0;
    /* One thread uses it, so it needs no locks. */
    curl_share_setopt(worker->share, CURLSHOPT_SHARE, CURL_LOCK_DATA_SSL_SESSION);
    curl_multi_setopt(worker->multi, CURLMOPT_MAXCONNECTS, max_connections);
    return pthread_create(&worker->thread, NULL, work, worker) == 0;
}

static int engine_init(Engine *engine, PyObject *arguments, PyObject *unused) {
    int small, large, max_connections, is_bad = 0;
    (void)unused;
    if (!PyArg_ParseTuple(arguments, "iii", &small, &large, &max_connections))
        return -1;
    if (small < 1 || large < 1 || small + large > MOST_WORKERS || engine->workers != NULL) {
        PyErr_SetString(PyExc_ValueError, "the number of workers");
        return -1;
    }
    PyObject *module = PyType_GetModule(Py_TYPE(engine));
    if (module == NULL)
        return -1;
    engine->completion_type = (PyTypeObject *)PyObject_GetAttrString(module, "Completion");
    engine->transfer_type = (PyTypeObject *)PyObject_GetAttrString(module, "Transfer");
    if (engine->completion_type == NULL || engine->transfer_type == NULL)
        return -1;
    engine->eventfd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (engine->eventfd < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    pthread_mutex_init(&engine->mutex, NULL);
    engine->small_count = small;
    engine->workers = calloc((size_t)(small + large), sizeof *engine->workers);
    /* Threads inherit it: signals are for Python's main thread. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 0; engine->workers && i < small + large && !is_bad; i++) {
        is_bad = !start_worker(engine, &engine->workers[i], max_connections);
        engine->worker_count += !is_bad;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (engine->workers == NULL || is_bad)
        PyErr_NoMemory();
    return engine->workers == NULL || is_bad ? -1 : 0;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    (void)arguments, (void)names;
    Engine *engine = (Engine *)type->tp_alloc(type, 0);
    if (engine != NULL)
        engine->eventfd = -1;
    return (PyObject *)engine;
}

static void engine_dealloc(Engine *engine) {
    PyTypeObject *type = Py_TYPE(engine);
    Py_XDECREF(engine_close(engine, NULL));
    for (struct transfer *t = engine->completed, *after; t != NULL; t = after) {
        after = t->next;
        Py_DECREF(t);
    }
    if (engine->eventfd >= 0) {
        close(engine->eventfd);
        pthread_mutex_destroy(&engine->mutex);
    }
    Py_XDECREF(engine->completion_type);
    Py_XDECREF(engine->transfer_type);
    type->tp_free(engine);
    Py_DECREF(type);
}

static PyObject *transfer_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    (void)arguments, (void)names;
    struct transfer *t = (struct transfer *)type->tp_alloc(type, 0);
    if (t == NULL)
        return NULL;
    t->sink_fd = t->body_fd = -1;
    reset_head(t);
    return (PyObject *)t;
}

static void transfer_dealloc(struct transfer *t) {
    PyTypeObject *type = Py_TYPE(t);
    if (t->body.obj != NULL)
        PyBuffer_Release(&t->body);
    curl_slist_free_all(t->headers);
    if (t->sink_fd >= 0)
        close(t->sink_fd);
    if (t->body_fd >= 0)
        close(t->body_fd);
    free(t->head.data), free(t->content.data), free(t->sums);
    free(t->method), free(t->url), free(t->proxy), free(t->ca_file), free(t->etag);
    type->tp_free(t);
    Py_DECREF(type);
}

static PyObject *transfer_has_begun(struct transfer *t, void *unused) {
    (void)unused;
    return PyBool_FromLong(atomic_load(&t->has_begun));
}

static PyGetSetDef transfer_properties[] = {
    {"has_begun", (getter)transfer_has_begun, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot transfer_slots[] = {
    {Py_tp_new, transfer_new},
    {Py_tp_dealloc, transfer_dealloc},
    {Py_tp_getset, transfer_properties},
    {0, NULL},
};

static PyType_Spec transfer_spec = {
    .name = "fusefs.store.engine._engine.Transfer",
    .basicsize = sizeof(struct transfer),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = transfer_slots,
};

static PyMethodDef engine_methods[] = {
    {"submit", (PyCFunction)engine_submit, METH_VARARGS, NULL},
    {"cancel", (PyCFunction)engine_cancel, METH_O, NULL},
    {"collect", (PyCFunction)engine_collect, METH_NOARGS, NULL},
    {"counters", (PyCFunction)engine_counters, METH_NOARGS, NULL},
    {"is_open", (PyCFunction)engine_is_open, METH_NOARGS, NULL},
    {"fileno", (PyCFunction)engine_fileno, METH_NOARGS, NULL},
    {"close", (PyCFunction)engine_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_init, engine_init},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "fusefs.store.engine._engine.Engine",
    .basicsize = sizeof(Engine),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};

static PyStructSequence_Field completion_fields[] = {
    {"status", NULL},      {"headers", NULL},
    {"body", NULL},        {"received", NULL},
    {"error", NULL},       {"errno", NULL},
    {"proxy_status", NULL}, {"detail", NULL},
    {"may_have_been_executed", NULL},
    {"connected_s", NULL}, {"first_byte_s", NULL},
    {"last_byte_s", NULL}, {NULL, NULL},
};

static PyStructSequence_Desc completion_description = {
    "fusefs.store.engine._engine.Completion", NULL, completion_fields, 12};

static PyObject *crc32_(PyObject *module, PyObject *arguments) {
    Py_buffer data;
    unsigned int crc = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "y*|I", &data, &crc))
        return NULL;
    crc = (uint32_t)crc_of(CRC32, crc, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *crc32_of_file(PyObject *module, PyObject *arguments) {
    int fd, error = 0;
    long long offset, length;
    uint32_t crc = 0;
    (void)module;
    if (!PyArg_ParseTuple(arguments, "iLL", &fd, &offset, &length))
        return NULL;
    char *piece = malloc(SEND);
    if (piece == NULL)
        return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS;
    while (length > 0 && !error) {
        ssize_t count = pread(fd, piece, length < SEND ? (size_t)length : SEND, offset);
        if (count > 0)
            crc = (uint32_t)crc_of(CRC32, crc, piece, (size_t)count);
        else if (count == 0 || errno != EINTR)
            error = count ? errno : ENODATA; /* the file became shorter */
        offset += count > 0 ? count : 0;
        length -= count > 0 ? count : 0;
    }
    Py_END_ALLOW_THREADS;
    free(piece);
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef module_methods[] = {
    {"crc32", crc32_, METH_VARARGS, NULL},
    {"crc32_of_file", crc32_of_file, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    /* Thread-safe since libcurl 7.84, and without effect but for the first call. */
    if (curl_global_init(CURL_GLOBAL_ALL) != CURLE_OK) {
        PyErr_SetString(PyExc_ImportError, "libcurl can't be initialised");
        return -1;
    }
    crc_prepare();
    PyObject *completion = (PyObject *)PyStructSequence_NewType(&completion_description);
    PyObject *engine = PyType_FromModuleAndSpec(module, &engine_spec, NULL);
    PyObject *transfer = PyType_FromModuleAndSpec(module, &transfer_spec, NULL);
    int is_bad = completion == NULL || engine == NULL || transfer == NULL ||
                 PyModule_AddObjectRef(module, "Transfer", transfer) < 0 ||
                 PyModule_AddObjectRef(module, "Completion", completion) < 0 ||
                 PyModule_AddObjectRef(module, "Engine", engine) < 0;
    Py_XDECREF(completion);
    Py_XDECREF(engine);
    Py_XDECREF(transfer);
    return is_bad ? -1 : 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_engine",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__engine(void) {
    return PyModuleDef_Init(&module);
}
