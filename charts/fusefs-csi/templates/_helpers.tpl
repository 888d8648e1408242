{{- define "fusefs-csi.labels" -}}
app.kubernetes.io/part-of: fusefs-csi
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The image of a container, with the policy of pulling it: (list IMAGE $). */}}
{{- define "fusefs-csi.imageOf" -}}
image: {{ include "fusefs-csi.image" (first .) }}
{{- with (last .).Values.imagePullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* An image of the values: by its digest where one is given. */}}
{{- define "fusefs-csi.image" -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ required (printf "%s: needs a tag or a digest" .repository) .tag }}
{{- end -}}
{{- end }}

{{- define "fusefs-csi.poolLabel" -}}
{{- with .name }}fusefs.dev/pool: {{ . | quote }}{{ end }}
{{- end }}

{{- define "fusefs-csi.logLevel" -}}
{{- with .Values.logLevel }}- --log-level={{ . }}{{ end }}
{{- end }}

{{/* Environment variables of all containers of ours, such as those of a proxy. */}}
{{- define "fusefs-csi.env" -}}
{{- range $name, $value := .Values.env }}
- {name: {{ $name | quote }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* The nodes with Linux before 6.9, which end a mount with its daemon. None without a cluster. */}}
{{- define "fusefs-csi.oldNodes" -}}
{{- range (lookup "v1" "Node" "" "").items }}
{{- $version := regexFind "^[0-9]+[.][0-9]+" .status.nodeInfo.kernelVersion | default "6.9" }}
{{- if semverCompare "<6.9" $version }} {{ .metadata.name }}{{ end }}
{{- end }}
{{- end }}

{{/* Whether the next pod of the daemons starts beside the old one: Linux before 6.9 needs that. */}}
{{- define "fusefs-csi.surge" -}}
{{- $surge := toString .Values.surge }}
{{- $isNeeded := or .Values.openshift.enabled (include "fusefs-csi.oldNodes" .) }}
{{- if or (eq $surge "true") (and (eq $surge "auto") $isNeeded) }}true{{ end }}
{{- end }}

{{/* The Secrets that provisioner and resizer read, as a list in JSON. */}}
{{- define "fusefs-csi.secretNames" -}}
{{- $names := compact (list .Values.controller.secretName) }}
{{- range $class := .Values.storageClasses }}
{{- range $use := list "provisioner" "controller-expand" }}
{{- with get $class.parameters (printf "csi.storage.k8s.io/%s-secret-name" $use) }}
{{- $namespace := get $class.parameters (printf "csi.storage.k8s.io/%s-secret-namespace" $use) }}
{{- if or (contains "$" .) (ne $namespace $.Release.Namespace) }}
{{- fail (printf "storageClasses: %s: the %s Secret has to be one of the namespace %s, by its name: the controller may read no other" $class.name $use $.Release.Namespace) }}
{{- end }}
{{- $names = append $names . }}
{{- end }}
{{- end }}
{{- end }}
{{- $names | uniq | sortAlpha | toJson }}
{{- end }}

{{/* Which nodes a pool's pods run on. */}}
{{- define "fusefs-csi.nodes" -}}
nodeSelector:
  {{- mergeOverwrite (deepCopy (default dict .values.selector)) (default dict .pool.nodeSelector) | toYaml | nindent 2 }}
tolerations:
  {{- toYaml .values.tolerations | nindent 2 }}
affinity:
  {{- toYaml .values.affinity | nindent 2 }}
{{- end }}

{{/* Fails where a node is in two pools for certain: the drivers of both would serve it. */}}
{{- define "fusefs-csi.checkPools" -}}
{{- range $first, $one := .Values.nodePools }}
{{- $selector := mergeOverwrite (deepCopy (default dict $.Values.nodes.selector)) $one.nodeSelector }}
{{- range $second, $other := $.Values.nodePools }}
{{- if and (ne $first $second) (eq $one.name $other.name) }}
{{- fail (printf "nodePools: two pools are named %s" $one.name) }}
{{- end }}
{{- $isWithin := ne $first $second }}
{{- range $key, $value := $other.nodeSelector }}
{{- if not (and (hasKey $selector $key) (eq (get $selector $key | toString) $value)) }}{{ $isWithin = false }}{{ end }}
{{- end }}
{{- if $isWithin }}
{{- fail (printf "nodePools: %s and %s have nodes in common, which drivers of both would serve" $other.name $one.name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "fusefs-csi.hardening" -}}
{{- if .selinux.type }}
seLinuxOptions: {type: {{ .selinux.type }}}
{{- end }}
{{- if .apparmor.isUnconfined }}
appArmorProfile: {type: Unconfined}
{{- end }}
{{- end }}

{{/* The file of stores (TOML): strings alone, which are those of JSON. */}}
{{- define "fusefs-csi.stores" -}}
{{- range $name, $store := .Values.stores }}
[stores.{{ $name }}]
{{- range $key, $value := $store }}
{{ $key }} = {{ $value | toJson }}
{{- end }}
{{ end }}
{{- end }}

{{/* The directory of a domain's secrets; no cacheDomain begins with a line. */}}
{{- define "fusefs-csi.cacheDirectory" -}}
{{ ternary "_others" . (eq . "*") }}
{{- end }}

{{/* The file of cluster caches (TOML). Its strings, and the quoted names of domains, are JSON's. */}}
{{- define "fusefs-csi.clusterCaches" -}}
{{- range $domain, $cache := .Values.clusterCaches }}
{{- $directory := printf "/etc/fusefs-csi-cluster-caches/%s" (include "fusefs-csi.cacheDirectory" $domain) }}
[cluster-caches.{{ toJson $domain }}]
url = {{ toJson $cache.url }}
{{- with $cache.endpoint }}
endpoint = {{ toJson . }}
{{- end }}
credentials-file = {{ printf "%s/credentials" $directory | toJson }}
key-file = {{ printf "%s/key" $directory | toJson }}
{{ end }}
{{- end }}

{{- define "fusefs-csi.configuration" -}}
{{- include "fusefs-csi.stores" . }}{{ toJson .Values.certificates }}{{ .Values.clusterId }}
{{- end }}

{{/* Of the tokens that kubelet requests for the driver: AWS', Pod Identity's, the stores' own. */}}
{{- define "fusefs-csi.audiences" -}}
{{- $audiences := list }}
{{- if .Values.csiDriver.serviceAccountTokens }}
{{- $audiences = append $audiences "sts.amazonaws.com" }}
{{- range .Values.stores }}
{{- if .audience }}{{- $audiences = append $audiences .audience }}{{- end }}
{{- end }}
{{- end }}
{{- if .Values.csiDriver.podIdentityTokens }}
{{- $audiences = append $audiences "pods.eks.amazonaws.com" }}
{{- end }}
{{- $audiences | uniq | toJson }}
{{- end }}

{{/* The ports of all stores, cluster caches and proxies outside of the cluster, as numbers. */}}
{{- define "fusefs-csi.ports" -}}
{{- $ports := list 443 }}
{{- range .Values.stores }}
{{- range $key, $url := pick . "endpoint-url" "sts-url" }}
{{- $parts := urlParse $url }}
{{- $default := ternary "80" "443" (eq $parts.scheme "http") }}
{{- $port := regexFind ":[0-9]+$" $parts.host | trimPrefix ":" | default $default }}
{{- $ports = append $ports (int $port) }}
{{- end }}
{{- end }}
{{- range .Values.clusterCaches }}
{{- with .endpoint }}
{{- $parts := urlParse . }}
{{- $default := ternary "80" "443" (eq $parts.scheme "http") }}
{{- $port := regexFind ":[0-9]+$" $parts.host | trimPrefix ":" | default $default }}
{{- $ports = append $ports (int $port) }}
{{- end }}
{{- end }}
{{- range .Values.networkPolicy.ports }}
{{- $ports = append $ports (int .) }}
{{- end }}
{{- $ports | uniq | toJson }}
{{- end }}
